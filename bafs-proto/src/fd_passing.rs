//! What a node hands over to an agent on the same machine, and what the two say to each other
//! then; opens no socket and decides nothing.
//!
//! An agent asks for a ticket over its authenticated connection ([`GetHandoffTicket`]), shows it at
//! the node's Unix socket ([`HandoffHello`]), and gets a header with open files
//! ([`HandoffHeader`]). The connection then stays for as long as the agent keeps what it got.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::hash::Digest;
use crate::ids::{BlockIndex, Epoch, FileIndex, VolumeId};
use crate::message::TreeRef;

/// Longest message at the door, in bytes; it travels as one packet.
pub const HANDOFF_MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Most open files that one message carries.
pub const HANDOFF_FILES_MAX: usize = 16;

/// A ticket is good for so long, in milliseconds: its holder is on the same machine.
pub const HANDOFF_TICKET_LIFETIME_MS: u64 = 10_000;

/// Name of the socket in a node's directory.
pub const HANDOFF_SOCKET_NAME: &str = "handoff.sock";

/// What an agent wants to have handed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HandoffTarget {
    /// The directory of a scratch volume.
    Tree {
        /// Which.
        tree: TreeRef,
        /// The agent's session with it.
        epoch: Epoch,
    },
    /// The blocks of a cache volume.
    Cache {
        /// Which.
        volume: VolumeId,
        /// State of the source that the agent works with.
        manifest: Digest,
    },
}

/// Asks a node to hand something over; an agent on another machine cannot use the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetHandoffTicket {
    /// What.
    pub target: HandoffTarget,
}

/// Where to fetch it, and with what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoffTicket {
    /// Absolute path of the node's socket on its machine.
    pub socket: String,
    /// To be shown there once, within [`HANDOFF_TICKET_LIFETIME_MS`].
    pub secret: TicketSecret,
}

/// A secret that is good once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TicketSecret(pub [u8; 32]);

impl fmt::Debug for TicketSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TicketSecret")
    }
}

/// First words of an agent at the door.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoffHello {
    /// [`crate::PROTOCOL_VERSION`] of the agent.
    pub version: u32,
    /// Its ticket.
    pub secret: TicketSecret,
}

/// Answer to a [`HandoffHello`].
pub type HandoffHelloReply = Result<HandoffHeader>;

/// What was handed over; the open files come beside it, in the order told here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HandoffHeader {
    /// A scratch volume.
    Tree(TreeHandoff),
    /// A cache volume.
    Cache(CacheHandoff),
}

/// A scratch volume whose directory comes as the first open file. A writer gets a second one: it
/// is locked, and as long as anybody has it open nobody else is given the volume to write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeHandoff {
    /// Where the directory is on this machine, if it may be shown to a job itself: then nobody
    /// accounts for operations, and the server watches what it holds.
    pub bind_path: Option<String>,
    /// Most bytes that it may hold.
    pub size_bytes: u64,
    /// Most files and directories that it may hold.
    pub size_files: u64,
    /// Bytes in use, about; a writer counts for itself.
    pub used_bytes: u64,
    /// Files and directories in use, about.
    pub used_files: u64,
}

/// A cache volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheHandoff {
    /// State of the source that is shown.
    pub manifest: Digest,
}

/// What an agent says after the hand-over; each call is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoffCall {
    /// Names the call in its answer.
    pub number: u64,
    /// What it asks.
    pub request: HandoffRequest,
}

/// What an agent asks after the hand-over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HandoffRequest {
    /// Tells what a handed-over tree holds now.
    ReportUse {
        /// In bytes.
        bytes: u64,
        /// In files and directories.
        files: u64,
    },
    /// Asks for the open file of a wholly cached file, to be kept until it is released.
    PinFile {
        /// Which.
        file: FileIndex,
    },
    /// Gives it back.
    ReleaseFile {
        /// Which.
        file: FileIndex,
    },
    /// Asks for blocks of a cache volume, wherever they are: as [`crate::message::ReadBlocks`].
    ReadBlocks {
        /// The file.
        file: FileIndex,
        /// The first block.
        first: BlockIndex,
        /// How many; those past the end of the file are left out.
        count: u32,
    },
}

/// Answer to a [`HandoffRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HandoffReply {
    /// Done, nothing to say.
    Done,
    /// The file, which comes as the open file beside this.
    Pinned,
    /// The blocks, one after the other from the beginning of the open file beside this, which is
    /// in memory; and the digest of each.
    Blocks(Vec<Digest>),
    /// The blocks are on this machine now, and the map says so.
    NowLocal,
}

/// What a node says after the hand-over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HandoffMessage {
    /// Answers a call.
    Reply {
        /// The call's number.
        number: u64,
        /// What it is told.
        result: Result<HandoffReply>,
    },
    /// What was handed over must be given back: stop using it, then close the connection.
    Revoke {
        /// Why.
        reason: Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;

    #[test]
    fn debug_output_hides_the_ticket() {
        assert_eq!(format!("{:?}", TicketSecret([7; 32])), "TicketSecret");
    }

    proptest::proptest! {
        #[test]
        fn decoding_garbage_never_panics(bytes: Vec<u8>) {
            let _ = codec::decode::<HandoffHello>(&bytes);
            let _ = codec::decode::<HandoffHelloReply>(&bytes);
            let _ = codec::decode::<HandoffCall>(&bytes);
            let _ = codec::decode::<HandoffMessage>(&bytes);
        }
    }
}
