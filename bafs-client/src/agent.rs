//! Opens the volumes of a job: which tree, which mode, whose files. Mounts nothing.

use bafs_proto::ids::AgentId;
use bafs_proto::limits::OP_DEADLINE_MS_DEFAULT;
use bafs_proto::message::{MountSpec, MountTarget, TreeRef};
use bafs_proto::net::pool::Pool;
use bafs_proto::{Error, Result};
use nix::unistd::{getegid, geteuid};
use tokio::sync::mpsc;

use crate::fate::{Fate, Loss};
use crate::logic::directory::Owner;
use crate::sandbox::Privilege;
use crate::tree::{CacheTree, RemoteTree, Server, Tree};
use crate::usage::Usage;
use crate::volume::{Mode, Ownership, Volume};

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
}

impl Agent {
    /// An agent that mounts by this right. A deadline of 0 means the default.
    pub fn new(pool: Pool, privilege: Privilege, op_deadline_ms: u64) -> Self {
        let ownership = match privilege {
            Privilege::Root => Ownership::AsStored,
            Privilege::UserNamespace { uid, gid } => Ownership::One {
                shown: Owner::default(),
                stored: Owner { uid, gid },
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
        }
    }

    /// Opens one volume; a later loss of it is sent to `losses`. Must be called within a tokio
    /// runtime, which then serves the volume.
    ///
    /// # Errors
    /// The server's, with the volume named.
    pub async fn open(
        &self,
        mount: &MountSpec,
        losses: mpsc::UnboundedSender<Loss>,
    ) -> Result<Volume> {
        let fate = Fate::new(&mount.name, losses);
        let (tree, mode, usage) = self
            .open_tree(mount, &fate)
            .await
            .map_err(|error| error.context(format_args!("cannot open volume {}", mount.name)))?;
        Ok(Volume::new(
            &mount.name,
            tree,
            mode,
            self.ownership,
            fate,
            usage,
        ))
    }

    async fn open_tree(
        &self,
        mount: &MountSpec,
        fate: &Fate,
    ) -> Result<(Tree, Mode, Usage), Error> {
        let server = |address: &str| Server {
            pool: self.pool.clone(),
            address: address.to_owned(),
            token: mount.token.clone(),
            op_deadline_ms: self.op_deadline_ms,
        };
        let remote = |address, tree| {
            RemoteTree::open(server(address), tree, self.id, mount.writable, fate.clone())
        };
        Ok(match &mount.target {
            MountTarget::Scratch { server, volume } => {
                let tree = remote(server, TreeRef::Volume(*volume)).await?;
                (
                    Tree::Remote(tree),
                    Mode::scratch(mount.writable),
                    Usage::new(),
                )
            }
            MountTarget::Home { server, path } => {
                let tree = remote(server, TreeRef::Home(path.clone())).await?;
                (
                    Tree::Remote(tree),
                    Mode::home(mount.writable),
                    Usage::with_pages(),
                )
            }
            MountTarget::Cache {
                server: address,
                volume,
            } => {
                let owner = match self.ownership {
                    Ownership::AsStored => Owner {
                        uid: geteuid().as_raw(),
                        gid: getegid().as_raw(),
                    },
                    Ownership::One { shown, .. } => shown,
                };
                let tree = CacheTree::open(server(address), *volume, owner, fate.clone()).await?;
                let tree = Tree::Cache(tree);
                let (whole_files, why) = tree.whole_files();
                tracing::debug!(volume = mount.name, whole_files, why, "path of reads");
                let mode = Mode {
                    whole_files,
                    ..Mode::cache()
                };
                (tree, mode, Usage::with_pages())
            }
        })
    }
}
