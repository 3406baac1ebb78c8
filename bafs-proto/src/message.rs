//! The calls: one struct for each request and one for each reply.
//!
//! [`Call`] ties a request to its reply. The macro `calls!` lists all pairs and generates two
//! closed sets from them, [`Request`] and [`Reply`]. So a server matches on one enum, and a caller
//! gets the type that belongs to its call. A reply of another call is `Malformed`.
//!
//! A request on the wire is a [`RequestHead`] and a body. The head has the token, the request and
//! the time that is left until the caller's deadline. Times of two machines are never compared. The
//! body has raw data: the bytes of a write, of an upload or of blocks. A reply is a [`ReplyHead`]
//! and a body.
//!
//! **Repetition.** Each call is safe to repeat, because its caller chooses the ids. A volume, an
//! execution or an extraction of a known id is the one that exists, and a batch of a known number
//! is answered from memory. An id that was used for something else gives `Conflict`.
//!
//! **Errors.** A server answers with one [`Error`], of a numbered code. Its class says who acts on
//! it (see [`crate::error`]). A failed file operation is no error of the call. It is an errno in
//! [`FileResults`], and the other operations of the batch have their own results.
//!
//! **Limits.** A head has at most 1 MiB, so listings come in pages. Each page names where the next
//! one begins. A body has at most 4 MiB, so longer data takes several calls.
//!
//! **Compatibility.** The encoding of [`Hello`] is frozen. Everything else may change with
//! [`crate::PROTOCOL_VERSION`]: peers of different versions refuse each other with an error that
//! names both.
//!
//! This file decides nothing and does no I/O. `docs/reference/protocol.md` is the reference.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use crate::advert::{Advert, CacheAdvert, HEAD_ATTRIBUTES, Lifetime, ServerKind};
use crate::attributes::Constraint;
pub use crate::block_calls::{
    BlockData, BlockRange, CacheRef, FetchPriority, FetchScope, PeerCheck, Probe, ProbePurpose,
    Promote, ReadBlocks, Touch,
};
pub use crate::cache::InvalidateVolume;
use crate::cache::{
    CacheStatus, DropRetainedData, GetCache, JoinCache, JoinCacheReply, ListRetainedData,
    RetainedDataList, WarmCache, WarmingStatus,
};
use crate::error::{Error, ErrorCode, Result};
use crate::fd_passing::{GetHandoffTicket, HandoffTicket};
use crate::file_op::{Caller, FileOp, FileResult};
use crate::file_set::FileSelection;
use crate::hash::Digest;
use crate::ids::{
    AgentId, Epoch, ExecutionId, ExtractionId, FileIndex, HandleId, InodeNo, ServerId, UploadEpoch,
    VolumeId,
};
use crate::job_report::VolumeUse;
pub use crate::job_report::{FindPrograms, JobOutput, MissingPrograms, ReadJobOutput};
use crate::node_quota::{NodeQuotaList, SetNodeQuota};
use crate::queue_call::{CallQueue, QueueAnswer};
use crate::replica::{
    FileMap, ListVolumeTree, MapVolumeFile, ReadSources, ReadVolumeFile, ReadVolumeFiles, TreePage,
};
pub use crate::source::{
    ListSource, ReadDigests, SourceBlocks, SourceDigests, SourceEntry, SourceIdentity, SourceKind,
    SourcePage, StatSource,
};
use crate::token::Token;
use crate::volume::{ResizeVolume, VolumeSpec, VolumeStatus};

/// Kind of a process, as its hello says. The certificate proves only the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A home, storage or catalog server.
    Server,
    /// A scheduler or a person's command line.
    Scheduler,
    /// An agent of a job.
    Agent,
}

/// First message on every connection. Its encoding never changes, so that other versions are
/// refused with a clear error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`crate::PROTOCOL_VERSION`] of the speaker.
    pub version: u32,
    /// Cluster of the speaker: a rehearsal must not talk to production.
    pub cluster: u64,
    /// What the speaker is.
    pub role: Role,
}

/// Header of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestHead {
    /// Time left until the caller's deadline, in milliseconds.
    pub time_left_ms: u32,
    /// Capability for what is asked.
    pub token: Token,
    /// What is asked.
    pub request: Request,
}

/// Header of a reply.
pub type ReplyHead = Result<Reply, Error>;

/// A request that has one type of reply.
pub trait Call: Into<Request> + Send {
    /// What a server answers.
    type Reply: Send;

    /// Takes the reply out of the closed set.
    ///
    /// # Errors
    /// `Malformed` when the server answered another call.
    fn reply(reply: Reply) -> Result<Self::Reply>;
}

macro_rules! calls {
    ($($call:ident => $reply:ident,)*) => {
        /// Every request, as a closed set.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[allow(missing_docs)] // each variant is the struct of that name
        pub enum Request {
            $($call($call),)*
        }

        /// Every reply, as a closed set; named after its call.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[allow(missing_docs)] // each variant is the reply to the call of that name
        pub enum Reply {
            $($call($reply),)*
        }

        impl Request {
            /// Name of the call, for messages and counters.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$call(_) => stringify!($call),)*
                }
            }
        }

        $(
            impl From<$call> for Request {
                fn from(call: $call) -> Self {
                    Self::$call(call)
                }
            }

            impl Call for $call {
                type Reply = $reply;

                fn reply(reply: Reply) -> Result<$reply> {
                    match reply {
                        Reply::$call(reply) => Ok(reply),
                        other => Err(wrong_reply(stringify!($call), &other)),
                    }
                }
            }
        )*
    };
}

fn wrong_reply(call: &str, reply: &Reply) -> Error {
    let head: String = format!("{reply:?}").chars().take(40).collect();
    Error::new(
        ErrorCode::Malformed,
        format!("answer to {call} is of another kind: {head}"),
    )
}

calls! {
    // catalog
    Advertise => AdvertiseReply,
    QueryServers => ServerList,
    // home
    ListSource => SourcePage,
    StatSource => SourceEntry,
    ReadSource => SourceData,
    BeginPut => PutProgress,
    PutRange => PutProgress,
    CommitPut => PutReceipt,
    // volumes of a storage server
    CreateVolume => VolumeStatus,
    ListVolumes => VolumeList,
    GetVolume => VolumeStatus,
    DeleteVolume => Done,
    RenewVolumes => RenewVolumesReply,
    InvalidateVolume => VolumeStatus,
    ListVolumeTree => TreePage,
    ReadVolumeFile => SourceData,
    ExtractFile => PutReceipt,
    // trees: file operations on a scratch volume or a home path
    OpenTree => TreeSession,
    RunFileOps => FileResults,
    CloseTree => Done,
    // blocks of a cache volume
    ReadManifest => ManifestPage,
    ReadBlocks => BlockData,
    Probe => BlockData,
    Promote => Done,
    Touch => Done,
    JoinCache => JoinCacheReply,
    GetCache => CacheStatus,
    WarmCache => WarmingStatus,
    // jobs on a node
    StartJob => Done,
    WatchJobs => JobReports,
    KillJob => Done,
    // every server
    ReadCounters => Counters,
    // on the same machine
    GetHandoffTicket => HandoffTicket,
    // parts of a node
    SetNodeQuota => NodeQuotaList,
    // many small files in one call, and sparse ones without their holes
    ReadVolumeFiles => SourceData,
    MapVolumeFile => FileMap,
    ReadSources => SourceData,
    PutFiles => PutResults,
    // what a job printed
    ReadJobOutput => JobOutput,
    // the end of a node
    DrainNode => Done,
    // data of sources that no volume shows
    ListRetainedData => RetainedDataList,
    DropRetainedData => RetainedDataList,
    // what jobs find on a node
    FindPrograms => MissingPrograms,
    // the queue of a service
    CallQueue => QueueAnswer,
    // the size of a volume
    ResizeVolume => VolumeStatus,
    // what a home says of blocks that other nodes send
    ReadDigests => SourceDigests,
    // the order of uploads to one target
    IssueUploadEpoch => UploadEpochReply,
}

/// Done, nothing to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done;

// ---------------------------------------------------------------------------------- catalog

/// Tells the catalog that a server is alive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advertise {
    /// What it says of itself.
    pub advert: Advert,
}

/// The catalog heard it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdvertiseReply {
    /// Servers known now.
    pub server_count: u32,
}

/// Asks for live servers. At most [`crate::attributes::COMPARISONS_MAX`] comparisons.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryServers {
    /// Only this kind.
    pub kind: Option<ServerKind>,
    /// Only servers whose attributes satisfy it ([`Advert::attribute`]).
    pub constraint: Constraint,
}

/// Live servers, ordered by id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerList {
    /// What each last said of itself.
    pub servers: Vec<Advert>,
}

// ------------------------------------------------------------------------------------- home

/// Reads a range of a home file; the data are the body of the reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadSource {
    /// Path below the export.
    pub path: String,
    /// What the file must still be; otherwise `SourceChanged`.
    pub identity: SourceIdentity,
    /// First byte.
    pub offset: u64,
    /// Number of bytes, cut at the end of the file.
    pub length: u32,
    /// The digests of the reply cover pieces of this many bytes.
    pub block_bytes: u32,
}

/// Data of a source file, in the body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceData {
    /// Digest of each piece of `block_bytes`, the last one shorter.
    pub digests: Vec<Digest>,
}

/// Asks for the epoch of uploads that are decided from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssueUploadEpoch {
    /// Address of a home that the node that is asked reaches; `None`: the home server that is
    /// asked.
    pub home_address: Option<String>,
    /// Which home server that is; `None`: whoever is there.
    pub home_id: Option<ServerId>,
    /// Path at home of one of the files.
    pub path: String,
}

/// The reply to [`IssueUploadEpoch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadEpochReply {
    /// Larger than all that the home issued before.
    pub epoch: UploadEpoch,
}

/// The place of an upload in the order of all uploads to one target. A home never replaces a file
/// by one with an earlier fence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UploadFence {
    /// What the home issued.
    pub epoch: UploadEpoch,
    /// Order of the uploads of one sender with one epoch.
    pub order: u64,
}

/// Starts or resumes an upload. Nothing is visible at the target before the commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BeginPut {
    /// The upload; repeating it resumes or shows that it is done.
    pub extraction: ExtractionId,
    /// Where the file shall be, below the export.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Its place in the order; `None`: after all others.
    pub fence: Option<UploadFence>,
}

/// Adds bytes (the body) to an upload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutRange {
    /// The upload.
    pub extraction: ExtractionId,
    /// Where the bytes go; must equal what was received so far.
    pub offset: u64,
}

/// Where an upload is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutProgress {
    /// Bytes received so far.
    pub received_bytes: u64,
    /// Set when the file is already in place.
    pub receipt: Option<PutReceipt>,
}

/// Puts an upload in place: digest checked, durable, renamed to its path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitPut {
    /// The upload.
    pub extraction: ExtractionId,
    /// Size that it must have.
    pub size: u64,
    /// Digest that it must have.
    pub digest: Digest,
    /// Its place in the order; `None`: after all others.
    pub fence: Option<UploadFence>,
}

/// Puts small files in place, whose bytes follow each other in the body. Each has a right of its
/// own and answers for itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutFiles {
    /// At most [`PUT_FILES_MAX`](crate::limits::PUT_FILES_MAX).
    pub files: Vec<PutFile>,
}

/// A file of a [`PutFiles`]: an upload that begins, arrives and is committed at once. One that was
/// begun in ranges is finished so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutFile {
    /// The upload; repeating it shows that it is done.
    pub extraction: ExtractionId,
    /// Where the file shall be, below the export.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Its size in bytes.
    pub size: u32,
    /// Digest that it must have.
    pub digest: Digest,
    /// Capability for its place.
    pub token: Token,
    /// Its place in the order; `None`: after all others.
    pub fence: Option<UploadFence>,
}

/// What became of the files of a [`PutFiles`], in the same order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutResults {
    /// One for each.
    pub results: Vec<Result<PutReceipt>>,
}

/// Proof that a file is durable at home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutReceipt {
    /// The upload.
    pub extraction: ExtractionId,
    /// Where the file is, below the export.
    pub path: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its digest.
    pub digest: Digest,
}

// ---------------------------------------------------------------------------------- volumes

/// Creates a volume and waits until it is ready (or the deadline passes: ask again).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateVolume {
    /// What is wanted.
    pub spec: VolumeSpec,
    /// Who is to make it: another server at the same address refuses with `StoreLost`. `None`:
    /// whoever is there.
    pub server: Option<ServerId>,
    /// An older copy of the source on the same server, which the caller may manage: what is the
    /// same there does not travel again. It may be anything, or gone: that only costs more.
    pub base: Option<VolumeId>,
    /// Capability for the source that fills it; empty when there is none.
    pub source_token: Token,
}

/// Lists volumes, page by page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListVolumes {
    /// Goes on after this id; `None` starts.
    pub after: Option<VolumeId>,
}

/// A page of volumes, ordered by id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeList {
    /// Each volume of the page that the token may see; perhaps none.
    pub volumes: Vec<VolumeStatus>,
    /// Where the next page goes on, `None` at the end.
    pub next: Option<VolumeId>,
}

/// Shows a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetVolume {
    /// Which.
    pub volume: VolumeId,
}

/// Deletes a volume; deleting it again is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeleteVolume {
    /// Which.
    pub volume: VolumeId,
}

/// Sign of interest: puts off the end of life of volumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenewVolumes {
    /// Which.
    pub volumes: Vec<VolumeId>,
    /// From now on their lifetime is at least this, in milliseconds, also after restarts.
    pub lifetime_ms: u64,
    /// Whether their space goes to whoever wants it, until somebody renews them otherwise: then
    /// they are deleted first.
    pub gives_way: bool,
}

/// Which of the asked volumes are not there (any more).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenewVolumesReply {
    /// Lost volumes.
    pub lost_volumes: Vec<VolumeId>,
}

/// Sends a file or a set of files of a scratch volume home, exactly once, and answers with the
/// receipt. The receipt of a set has the path and the digest of its manifest, and the size of all
/// its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtractFile {
    /// From this volume,
    pub volume: VolumeId,
    /// this file; the words of the selections for a set,
    pub path: String,
    /// or this set of files, each part of which finds at least one; none for one file,
    pub selections: Vec<FileSelection>,
    /// as this upload,
    pub extraction: ExtractionId,
    /// to the home server at this address,
    pub home_address: String,
    /// which is this one; `None`: whoever is there,
    pub home_id: Option<ServerId>,
    /// to this path; a set goes below it,
    pub target_path: String,
    /// in this place of the order of uploads there; `None`: after all others,
    pub fence: Option<UploadFence>,
    /// with this capability.
    pub home_token: Token,
}

// ------------------------------------------------------------------------------------ trees

/// Names a tree that takes file operations.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TreeRef {
    /// A scratch volume of a storage server.
    Volume(VolumeId),
    /// A directory of a home server (remote I/O).
    Home(String),
}

/// Opens a tree for an agent. A writer fences all earlier writers of a volume, unless it yields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenTree {
    /// Which tree.
    pub tree: TreeRef,
    /// The agent.
    pub agent: AgentId,
    /// Whether it will write.
    pub writable: bool,
    /// Whether a writer is refused with `LeaseHeld` while another agent writes the volume, instead
    /// of fencing that.
    pub yields: bool,
    /// Goes on with an earlier session of the same agent that the server no longer knows: what
    /// [`TreeSession::machine_incarnation`] was then. Refused when data may be missing since, or
    /// when another agent has written since.
    pub resumed_incarnation: Option<u64>,
}

/// A session of an agent with a tree, as its server opened it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeSession {
    /// Names the session in later calls.
    pub epoch: Epoch,
    /// The session ends when it is silent for so long, in milliseconds.
    pub lease_ms: u64,
    /// Names the present life of the server's machine: what was written and not yet synced is
    /// there as long as it is the same.
    pub machine_incarnation: u64,
    /// So many files the agent may have open of which it says so before the server has opened
    /// them: all writers together may open half as many early as the server has descriptors. Those
    /// are kept for them: what is opened in time fails rather than take them. 0 for a home. At most
    /// [`EARLY_HANDLES_MAX`](crate::limits::EARLY_HANDLES_MAX).
    pub early_handles_max: u32,
}

/// Runs operations in order; each answers for itself. Also renews the lease (no operations).
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFileOps {
    /// Which tree.
    pub tree: TreeRef,
    /// The session.
    pub epoch: Epoch,
    /// Number of this batch within the session, from 1. A number that the server has answered
    /// before is answered again from memory, so that a lost reply never runs an operation twice.
    pub sequence: u64,
    /// If given, the batch runs when the batch of this number has run; 0 for the first. Batches
    /// that are given an order are each other's neighbours in one chain. A batch of
    /// [`FileOp::Fsync`] alone is none of them: it waits for its predecessor, and no other waits
    /// for it.
    pub after_sequence: Option<u64>,
    /// On whose behalf.
    pub caller: Caller,
    /// What to do.
    pub ops: Vec<FileOp>,
    /// Numbers for what operations make, so that later ones can name it before it is made.
    pub assigned_numbers: Vec<AssignedNumbers>,
}

/// How an agent calls what one of its operations makes; the session uses these numbers then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedNumbers {
    /// Place of the operation in its batch.
    pub op_index: u32,
    /// The file that it makes; `None` if it makes none.
    pub ino: Option<InodeNo>,
    /// The handle that it opens; `None` if it opens none.
    pub handle: Option<HandleId>,
}

impl fmt::Debug for RunFileOps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "RunFileOps({:?}, epoch {}, {} ops)",
            self.tree,
            self.epoch,
            self.ops.len()
        )
    }
}

/// Results, one for each operation, in order; read data follow each other in the body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileResults {
    /// One result for each operation.
    pub results: Vec<FileResult>,
}

/// Ends a session; its open files are closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloseTree {
    /// Which tree.
    pub tree: TreeRef,
    /// The session.
    pub epoch: Epoch,
    /// When the session may write a volume: the volume's lifetime is at least this from now on, in
    /// milliseconds, also after restarts, as it holds what nobody wants to lose.
    pub lifetime_ms_min: u64,
}

// ------------------------------------------------------------------------------ cache blocks

/// Reads the list of files of a cache volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadManifest {
    /// Which.
    pub volume: VolumeId,
    /// First entry wanted.
    pub first: FileIndex,
}

/// A page of a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestPage {
    /// Digest of the whole manifest: all pages must agree.
    pub manifest: Digest,
    /// Block size in bytes.
    pub block_bytes: u32,
    /// What tells the node that blocks of other nodes are right.
    pub peer_check: PeerCheck,
    /// The directory that the volume is at its top; its path is empty.
    pub root: SourceEntry,
    /// Entries from `first` on, in path order; the place in the whole is the [`FileIndex`].
    pub entries: Vec<SourceEntry>,
    /// Whether entries follow.
    pub has_more: bool,
}

// ------------------------------------------------------------------------------------- jobs

/// A program to run, with the job's own view of paths.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobCommand {
    /// Path of the program in the job's name space, or a name to find on `PATH`.
    pub executable: String,
    /// Arguments, without the program's name.
    pub arguments: Vec<String>,
    /// Added to the environment.
    pub environment: BTreeMap<String, String>,
    /// Working directory in the job's name space.
    pub directory: String,
    /// File in the job's name space that takes standard output; `None` keeps only its end.
    pub stdout: Option<String>,
    /// File in the job's name space that takes standard error; `None` keeps only its end.
    pub stderr: Option<String>,
    /// Which of `/tmp`, `/var/tmp` and `/dev/shm` are the host's; the others are the job's own.
    pub shared_directories: Vec<String>,
    /// Absolute paths of files without which the program does not start.
    pub required_files: Vec<String>,
    /// Absolute paths of files without which an end with 0 counts as a failure.
    pub produced_files: Vec<String>,
}

/// A volume in a job's name space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountSpec {
    /// Name of the volume, for messages and the job's environment.
    pub name: String,
    /// Absolute path in the job's name space.
    pub path: String,
    /// What is mounted.
    pub target: MountTarget,
    /// Whether the job may write.
    pub writable: bool,
    /// Whether the kernel may collect what is written to a scratch volume, and send it later.
    pub write_back: bool,
    /// Capability for it.
    pub token: Token,
    /// The lifetime of the volume is at least this after a job that ended with 0, in milliseconds.
    pub lifetime_ms_min: u64,
}

/// What a mount shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountTarget {
    /// A scratch volume.
    Scratch {
        /// Storage server that holds it, `host:port`.
        server: String,
        /// The volume.
        volume: VolumeId,
    },
    /// A cache volume, through the storage server next to the job.
    Cache {
        /// Storage server to ask, `host:port`.
        server: String,
        /// The volume there.
        volume: VolumeId,
    },
    /// A directory of a home server, nothing cached (remote I/O).
    Home {
        /// Home server, `host:port`.
        server: String,
        /// Directory below the export.
        path: String,
    },
}

/// What an agent needs to run one job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Name of the job, for people.
    pub name: String,
    /// The program.
    pub command: JobCommand,
    /// Its volumes.
    pub mounts: Vec<MountSpec>,
    /// Deadline of each remote operation, in milliseconds.
    pub op_deadline_ms: u64,
    /// What it may use of its node.
    #[serde(default)]
    pub limits: JobLimits,
}

/// What a job may use of its node, apart from its volumes. Its node ends a job that uses more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobLimits {
    /// Memory of all its processes together, in bytes: what is private to them, and what they
    /// share by name. `None`: as much as the node has.
    pub memory_bytes: Option<u64>,
    /// From the start of its agent, in milliseconds. `None`: as long as it wants.
    pub runtime_ms: Option<u64>,
    /// Of its private `/tmp` and `/var/tmp` together. `None`: the part of a slot of its node.
    pub temporary_bytes: Option<u64>,
}

/// Starts a job on a node; starting the same execution again is harmless.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartJob {
    /// This execution of the job.
    pub execution: ExecutionId,
    /// The job.
    pub job: JobSpec,
}

/// Asks for reports of executions; waits until there is news or the deadline comes near.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchJobs {
    /// Executions of interest.
    pub executions: Vec<ExecutionId>,
    /// Waits at most so long for one of them to end, in milliseconds.
    pub wait_ms: u32,
}

/// State of executions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobReports {
    /// One entry for each execution asked for, in order; `None` for one that is not known here.
    pub reports: Vec<Option<JobState>>,
}

/// State of one execution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobState {
    /// Under way.
    Running,
    /// Over.
    Ended(JobReport),
}

/// How an execution ended and what it used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobReport {
    /// How it ended.
    pub outcome: JobOutcome,
    /// Wall time in milliseconds.
    pub wall_ms: u64,
    /// CPU time in milliseconds.
    pub cpu_ms: u64,
    /// The most memory that was seen of it, in bytes: of all its processes where a control group
    /// holds them, else the resident memory of the largest one. 0 when that is not known.
    #[serde(default)]
    pub memory_bytes_max: u64,
    /// End of standard output and error, for messages.
    pub output_tail: String,
    /// What it did to each of its volumes.
    pub volumes: Vec<VolumeUse>,
}

/// How an execution ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobOutcome {
    /// The program ended by itself with this exit code.
    Exited(i32),
    /// The program was ended by this signal.
    Signaled(i32),
    /// The program could not be started: missing, not executable, wrong format.
    NotStarted(String),
    /// The environment failed (exit code 75 of `bafs exec`).
    EnvironmentFailed(Error),
    /// It was killed by request.
    Killed,
}

/// Kills a job with all its processes; killing it again is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KillJob {
    /// This execution.
    pub execution: ExecutionId,
}

/// Asks a node to take no new work and to say so; asking again is harmless. Runs copy what only it
/// has. It goes on to serve until somebody ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainNode;

// --------------------------------------------------------------------------------- counters

/// Reads a server's counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadCounters;

/// Counters by name; they only grow while the server lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// The server.
    pub server: ServerId,
    /// Value of each counter.
    pub values: BTreeMap<String, u64>,
}
