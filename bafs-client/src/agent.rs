//! Opens the volumes of a job: which tree serves each, in which mode, and whose files it shows.
//!
//! [`Agent`] has what all volumes of a process share: connections, its id, ownership and options.
//! [`Agent::open_volume`] takes a [`MountSpec`] and returns a [`Volume`]. Nothing is mounted here.
//!
//! The target of the mount and the location of the server decide the tree:
//!
//! | Target | Where | Tree |
//! |---|---|---|
//! | scratch volume, exact limit | this machine | `Inline`: operations run in this process |
//! | scratch volume, watched limit | this machine | `BindMount`: the kernel alone |
//! | scratch volume | another machine | `Remote`, with delegation for a writer |
//! | cache volume | its own node | `Cache`: names in memory, data in blocks |
//! | directory of a home | anywhere | `Remote`, nothing is cached |
//!
//! For a scratch volume the agent first opens a session by a call. Then it asks for a hand-over. A
//! refusal is no error: the agent goes on with calls, and notes the reason. A hand-over that breaks
//! off costs the session, so the agent opens another one.
//!
//! **Errors.** `open_volume` returns the server's error with the name of the volume. Later failures
//! go to `losses`, the channel of [`VolumeLoss`], and the job ends.
//!
//! **Ownership.** A job without root runs in a user name space, where one user exists. So the agent
//! shows all files as that user's ([`Ownership::SingleOwner`]). As root, owners are shown as
//! stored.
//!
//! **For people.** With [`Explain::Yes`] the agent prints which way it reaches each volume, and why
//! not a better one (`--explain`).
//!
//! An agent is cheap to clone. It has no state of its own beyond the pool of connections.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use bafs_proto::Result;
use bafs_proto::file_op::{Caller, FileOp, FileReply};
use bafs_proto::ids::{AgentId, InodeNo, VolumeId};
use bafs_proto::limits::OP_DEADLINE_MS_DEFAULT;
use bafs_proto::message::{MountSpec, MountTarget, TreeRef};
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use nix::unistd::{getegid, geteuid};
use tokio::sync::{mpsc, oneshot};

use crate::fd_passing::HandoffError;
use crate::limits::SILENCE_TIMEOUT_MIN;
use crate::logic::manifest_tree::Owner;
use crate::sandbox::{Access, Privilege, is_root_of_machine};
use crate::tree::{
    self, CacheTree, Completion, DataPath, Durability, MountLocation, RemoteTree, Server, Tree,
};
use crate::usage::VolumeUsage;
use crate::volume::{FileReads, Ownership, Volume, VolumeMode};
use crate::volume_health::{VolumeHealth, VolumeLoss};

/// How a volume is reached, for people.
const EXPLAIN_INLINE: &str = "inline: this process runs each operation on the server's local \
                              directory, without messages";
const EXPLAIN_BIND_MOUNT: &str = "directory: the job uses the server's local directory itself, \
    without messages; the server watches its size";
const EXPLAIN_CALLS: &str = "calls: each operation is a call to the server";
const EXPLAIN_DELEGATED: &str = "calls: operations that are certain to succeed return early and \
    reach the server in order; fsync and the end of the job wait for the server";
const EXPLAIN_DELEGATED_CLOSE: &str = "calls: operations that are certain to succeed return early \
    and reach the server in order; close, fsync and name changes wait for the server";
const EXPLAIN_HOME: &str = "calls: each operation is a call to the home server, without a cache";
const EXPLAIN_PASSTHROUGH: &str = "whole files: the kernel reads complete local files directly";
const EXPLAIN_BLOCKS: &str =
    "blocks: names are in memory, and the node's server sends data in blocks";

/// What all volumes of one agent process share.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Connections to servers.
    pub pool: Pool,
    /// This process, as servers know it.
    pub id: AgentId,
    /// Who owns files as the job sees them.
    pub ownership: Ownership,
    /// Deadline of each remote operation, in milliseconds.
    pub op_deadline_ms: u64,
    /// Where it shows volumes.
    pub mount_location: MountLocation,
    /// How it works, as the command line says.
    pub options: AgentOptions,
    /// Where a job's temporary files go; the host's directories if `None`.
    pub temporary: Option<TemporaryLocation>,
    /// Where the job's output is written while it runs, as the beginning of the files' names.
    pub output_prefix: Option<PathBuf>,
}

/// Where a job's own directories for temporary files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemporaryLocation {
    /// A directory of this host for one job. Who made it removes it.
    pub directory: PathBuf,
    /// The most bytes of memory that the job's processes share by name.
    pub memory_bytes: u64,
}

impl TemporaryLocation {
    /// Removes what a job left, also in directories that it closed to itself.
    pub(crate) fn remove_all(&self) {
        for entry in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            if entry.file_type().is_ok_and(|file| file.is_dir())
                && let Err(error) = bafs_tree::remove_tree(&entry.path())
            {
                let path = entry.path();
                tracing::warn!(%error, path = %path.display(), "cannot remove temporary files");
            }
        }
    }
}

/// Options of an agent from its command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgentOptions {
    /// Whether a person is told how each volume is reached.
    pub explain: Explain,
    /// Whether the writer of a volume behind the network is answered before the server has run what
    /// is sure to succeed there, and what is promised then.
    pub durability: Option<Durability>,
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self {
            explain: Explain::No,
            durability: None,
        }
    }
}

/// Whether a person is told how each volume is reached, and why not better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Explain {
    /// In the log only.
    No,
    /// On standard error too.
    Yes,
}

/// A tree that is opened, with what a volume needs besides.
struct OpenedTree {
    tree: Tree,
    mode: VolumeMode,
    usage: VolumeUsage,
    /// How it is reached, for people.
    way: String,
}

/// Whose files are on an ordinary user's own mount. Files of a node of another user are shown as
/// this user's: the token said what may be done with them, and the kernel would refuse it.
async fn owner_on_host(tree: &Tree) -> Ownership {
    let own = Owner {
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
    };
    let (told, answer) = oneshot::channel();
    let done: Completion = Box::new(move |result, _| {
        let _ = told.send(result);
    });
    let op = FileOp::GetAttr {
        ino: InodeNo::ROOT,
        handle: None,
    };
    tree.run(Caller::default(), op, &[], done);
    match answer.await {
        Ok(Ok(FileReply::Attr(attr))) if attr.uid != own.uid => Ownership::SingleOwner {
            visible_owner: own,
            stored_owner: own,
        },
        _ => Ownership::AsStored,
    }
}

impl Agent {
    /// How long its process may be silent until it is taken for stuck.
    pub(crate) fn silence_timeout(&self) -> Duration {
        Duration::from_millis(self.op_deadline_ms).max(SILENCE_TIMEOUT_MIN)
    }

    /// An agent that mounts by this right. A deadline of 0 means the default.
    pub fn new(pool: Pool, privilege: Privilege, op_deadline_ms: u64) -> Self {
        let ownership = match privilege {
            Privilege::Root => Ownership::AsStored,
            Privilege::UserNamespace { uid, gid } => Ownership::SingleOwner {
                visible_owner: Owner::default(),
                stored_owner: Owner { uid, gid },
            },
        };
        let op_deadline_ms = if op_deadline_ms == 0 {
            OP_DEADLINE_MS_DEFAULT
        } else {
            op_deadline_ms
        };
        Self {
            pool,
            id: AgentId::random(),
            ownership,
            op_deadline_ms,
            mount_location: MountLocation::Job,
            options: AgentOptions::default(),
            temporary: None,
            output_prefix: None,
        }
    }

    /// Opens one volume; a later loss of it is sent to `losses`. Must be called within a tokio
    /// runtime, which then serves the volume.
    ///
    /// # Errors
    /// The server's, with the volume named.
    pub async fn open_volume(
        &self,
        mount: &MountSpec,
        losses: mpsc::UnboundedSender<VolumeLoss>,
    ) -> Result<Volume> {
        let volume_status = VolumeHealth::new(&mount.name, losses);
        let opened = self.open_tree(mount, &volume_status).await;
        let OpenedTree {
            tree,
            mode,
            usage,
            way,
        } = opened
            .map_err(|error| error.context(format_args!("cannot open volume {}", mount.name)))?;
        tracing::debug!(volume = mount.name, way, "volume opened");
        if self.is_explaining() {
            let over = self.describe_transport(&mount.target).await;
            self.explain(&mount.name, &format!("{way}{over}"));
        }
        let ownership = match (tree.data_path(), self.ownership) {
            // Files are made by this process, in whose name space its user has the shown number.
            (
                DataPath::Inline,
                Ownership::SingleOwner {
                    visible_owner: shown,
                    ..
                },
            ) => {
                let stored = shown;
                Ownership::SingleOwner {
                    visible_owner: shown,
                    stored_owner: stored,
                }
            }
            (_, Ownership::AsStored)
                if self.mount_location == MountLocation::Host && !is_root_of_machine() =>
            {
                owner_on_host(&tree).await
            }
            (_, ownership) => ownership,
        };
        Ok(
            Volume::new(&mount.name, tree, mode, ownership, volume_status, usage)
                .with_access_path(way),
        )
    }

    /// Over what the server of a volume is reached, for people: its lease goes there at least.
    async fn describe_transport(&self, target: &MountTarget) -> String {
        let (MountTarget::Scratch { server, .. }
        | MountTarget::Home { server, .. }
        | MountTarget::Cache { server, .. }) = target;
        // Mostly the connection by which the volume was opened.
        let deadline = Deadline::after_ms(self.op_deadline_ms);
        match self.pool.connection(server, deadline).await {
            Ok(connection) => format!(
                "; calls reach {server} over {}",
                connection.transport_name()
            ),
            Err(error) => format!("; {server} is unreachable: {error}"),
        }
    }

    fn is_explaining(&self) -> bool {
        self.options.explain == Explain::Yes
    }

    /// Tells how a volume is reached, if somebody wants to know.
    pub(crate) fn explain(&self, volume: &str, way: &str) {
        if self.is_explaining() {
            // Without a standard error there is nobody to tell.
            let _ = writeln!(std::io::stderr(), "bafs: volume {volume}: {way}");
        }
    }

    /// A tree behind the network, of which this process is the writer.
    async fn delegate(&self, tree: RemoteTree) -> Tree {
        if let Some(promise) = self.options.durability {
            tree.delegate(promise).await;
        }
        Tree::Remote(tree)
    }

    /// The tree of a scratch volume, by the best way that there is, and which that is, for people.
    async fn open_scratch_tree<F: Future<Output = Result<RemoteTree>>>(
        &self,
        open: impl Fn() -> F,
        writable: bool,
        health: &VolumeHealth,
    ) -> Result<(Tree, String)> {
        let taken = tree::take_handoff(open().await?, writable, self.mount_location, health).await;
        let (tree, why) = match taken {
            Ok(taken) => taken,
            Err((tree, HandoffError::Refused(why))) => {
                (self.delegate(tree).await, Some(why.to_string()))
            }
            Err((tree, HandoffError::Interrupted(why))) => {
                tree.close(0).await;
                (self.delegate(open().await?).await, Some(why.to_string()))
            }
        };
        let durability = self.options.durability.filter(|_| writable);
        let way = explain_path(tree.data_path(), durability);
        let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
        Ok((tree, format!("{way}{why}")))
    }

    async fn open_tree(&self, mount: &MountSpec, health: &VolumeHealth) -> Result<OpenedTree> {
        let server = |address: &str| Server {
            pool: self.pool.clone(),
            address: address.to_owned(),
            token: mount.token.clone(),
            op_deadline_ms: self.op_deadline_ms,
        };
        let remote = |address, tree| {
            RemoteTree::open(
                server(address),
                tree,
                self.id,
                mount.writable,
                health.clone(),
            )
        };
        let access = match mount.writable {
            true => Access::ReadWrite,
            false => Access::ReadOnly,
        };
        Ok(match &mount.target {
            MountTarget::Scratch { server, volume } => {
                let open = || remote(server, TreeRef::Volume(*volume));
                let (tree, mut way) = self.open_scratch_tree(open, mount.writable, health).await?;
                let (file_reads, why) = tree.passthrough_support();
                if file_reads == FileReads::Passthrough {
                    way = format!("{way}; {why}");
                }
                let mode = match mount.write_back && mount.writable {
                    true => VolumeMode::write_back(),
                    false => VolumeMode::scratch(access),
                };
                OpenedTree {
                    tree,
                    mode: VolumeMode { file_reads, ..mode },
                    usage: VolumeUsage::new(),
                    way,
                }
            }
            MountTarget::Home { server, path } => {
                let tree = remote(server, TreeRef::Home(path.clone())).await?;
                OpenedTree {
                    tree: Tree::Remote(tree),
                    mode: VolumeMode::home(access),
                    usage: VolumeUsage::with_pages(),
                    way: EXPLAIN_HOME.to_owned(),
                }
            }
            MountTarget::Cache {
                server: address,
                volume,
            } => self.open_cache(server(address), *volume, health).await?,
        })
    }

    async fn open_cache(
        &self,
        server: Server,
        volume: VolumeId,
        health: &VolumeHealth,
    ) -> Result<OpenedTree> {
        let owner = match self.ownership {
            Ownership::AsStored => Owner {
                uid: geteuid().as_raw(),
                gid: getegid().as_raw(),
            },
            Ownership::SingleOwner { visible_owner, .. } => visible_owner,
        };
        let tree = CacheTree::open(server, volume, owner, health.clone()).await?;
        let peer_check = tree.explain_peer_check();
        let tree = Tree::Cache(tree);
        let (file_reads, why) = tree.passthrough_support();
        let way = match file_reads {
            FileReads::Passthrough => EXPLAIN_PASSTHROUGH,
            FileReads::Agent => explain_path(tree.data_path(), None),
        };
        Ok(OpenedTree {
            tree,
            mode: VolumeMode {
                file_reads,
                ..VolumeMode::cache()
            },
            usage: VolumeUsage::with_pages(),
            way: format!("{way} ({why}; {peer_check})"),
        })
    }
}

/// How a path reaches a volume, for people; a writer is answered early if anything is promised.
fn explain_path(path: DataPath, durability: Option<Durability>) -> &'static str {
    match (path, durability) {
        (DataPath::BindMounted, _) => EXPLAIN_BIND_MOUNT,
        (DataPath::Inline, _) => EXPLAIN_INLINE,
        (DataPath::Cached, _) => EXPLAIN_BLOCKS,
        (DataPath::Remote, None) => EXPLAIN_CALLS,
        (DataPath::Remote, Some(Durability::OnSync)) => EXPLAIN_DELEGATED,
        (DataPath::Remote, Some(Durability::OnClose)) => EXPLAIN_DELEGATED_CLOSE,
    }
}
