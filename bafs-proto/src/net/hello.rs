//! How connections begin, on any channel: a name is resolved to an address, and both ends exchange
//! a hello.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::PROTOCOL_VERSION;
use crate::error::{Error, ErrorCode, Result};
use crate::identity::Identity;
use crate::ids::ServerId;
use crate::limits::{BODY_BYTES_MAX, HEAD_BYTES_MAX};
use crate::message::Hello;

/// Time for the peer to say hello, in milliseconds.
pub(super) const HELLO_TIMEOUT_MS: u64 = 5_000;

/// A peer that sends nothing for so long counts as lost, in milliseconds; the next call reconnects.
pub(super) const IDLE_TIMEOUT_MS: u32 = 5_000;

/// How often a quiet connection is kept alive, in milliseconds.
pub(super) const KEEP_ALIVE_INTERVAL_MS: u64 = 1_000;

/// Time for a request to arrive whole and for a reply to be taken, in milliseconds: the largest
/// frame at 10 kB/s. Callers time out long before, by their own deadlines. This bounds the memory
/// that a live peer occupies without reading.
pub(super) const FRAME_TIMEOUT_MS: u64 = 600_000;

/// A server's answer to a [`Hello`] of its own version. Any other version gets an error, so this
/// type may change with the version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HelloReply {
    /// Its own hello.
    pub(super) hello: Hello,
    /// The server's id, if it has one: homes do, because another home may replace them.
    pub(super) server: Option<ServerId>,
}

/// The hello of a process with this identity.
pub(super) fn own_hello(identity: &Identity) -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        cluster: identity.cluster,
        role: identity.role,
    }
}

/// Refuses another version or another cluster in words.
pub(super) fn check_hello(ours: &Hello, theirs: &Hello) -> Result<()> {
    if theirs.version != ours.version {
        let text = format!(
            "peer speaks protocol {}, this is {}; run the same `bafs` on every machine",
            theirs.version, ours.version
        );
        return Err(Error::new(ErrorCode::VersionMismatch, text));
    }
    if theirs.cluster != ours.cluster {
        return Err(Error::new(
            ErrorCode::PeerRefused,
            "peer belongs to another cluster",
        ));
    }
    Ok(())
}

/// The server's answer to a hello: its identity, or the reason why it rejects the peer.
pub(super) fn reply_to_hello(
    ours: &Hello,
    theirs: &Result<Hello>,
    server: Option<ServerId>,
) -> Result<HelloReply> {
    let theirs = theirs.as_ref().map_err(Clone::clone)?;
    check_hello(ours, theirs)?;
    let hello = ours.clone();
    Ok(HelloReply { hello, server })
}

/// The first address of a name, `host:port`.
pub(super) async fn resolve(address: &str) -> Result<SocketAddr> {
    tokio::net::lookup_host(address)
        .await
        .ok()
        .and_then(|mut all| all.next())
        .ok_or_else(|| {
            let text = format!("'{address}' is not the address of a machine; write HOST:PORT");
            Error::new(ErrorCode::Unreachable, text)
        })
}

/// The two lengths before a frame, as they travel.
pub(super) fn encode_lengths(head: &[u8], body: &[u8]) -> Result<[u8; 8]> {
    let length_of = |bytes: &[u8]| {
        let long = |_| Error::new(ErrorCode::Malformed, "frame too long");
        u32::try_from(bytes.len()).map_err(long)
    };
    let mut lengths = [0; 8];
    lengths[..4].copy_from_slice(&length_of(head)?.to_le_bytes());
    lengths[4..].copy_from_slice(&length_of(body)?.to_le_bytes());
    Ok(lengths)
}

/// Lengths of head and body, within their limits.
pub(super) fn decode_lengths(lengths: [u8; 8]) -> Result<(usize, usize)> {
    let [a, b, c, d, e, f, g, h] = lengths;
    let head = u32::from_le_bytes([a, b, c, d]);
    let body = u32::from_le_bytes([e, f, g, h]);
    if head > HEAD_BYTES_MAX || body > BODY_BYTES_MAX {
        let text = format!("frame of {head} + {body} bytes is over the limit");
        return Err(Error::new(ErrorCode::Malformed, text));
    }
    Ok((head as usize, body as usize))
}

/// The other end ended in the middle.
pub(super) fn peer_closed_error() -> Error {
    Error::new(ErrorCode::Unreachable, "the peer closed the connection")
}

/// The library's outer error names the layer; the cause is in its sources.
pub(super) fn connection_error(error: &(dyn std::error::Error + 'static)) -> Error {
    let end = error.downcast_ref::<std::io::Error>();
    if end.is_some_and(|end| end.kind() == std::io::ErrorKind::UnexpectedEof) {
        // The process at the other end was killed, or a device between cut the connection; the
        // library speaks of attacks on TLS.
        return peer_closed_error();
    }
    let mut text = error.to_string();
    let mut below = error.source();
    while let Some(cause) = below {
        text = format!("{text}: {cause}");
        below = cause.source();
    }
    Error::new(ErrorCode::Unreachable, text)
}
