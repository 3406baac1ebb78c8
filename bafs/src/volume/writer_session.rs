//! A session that writes a scratch volume from this program: batches of file operations, each run
//! once, with a sign of life while the program reads what it sends. Yields to other writers. Knows
//! no file of this machine.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::Result;
use bafs_proto::file_op::{Attr, BodyRange, Caller, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::{AgentId, Epoch, HandleId, InodeNo, VolumeId};
use bafs_proto::limits::IO_BYTES_MAX;
use bafs_proto::message::{Advert, CloseTree, OpenTree, RunFileOps, TreeRef};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode};
use bytes::Bytes;
use nix::errno::Errno as HostErrno;
use nix::fcntl::OFlag;
use tokio::task::JoinHandle;

use crate::client::ClusterClient;
use crate::failure::{ClassifiedError, FailureClass};

/// Time for one call, in milliseconds.
const CALL_TIMEOUT_MS: u64 = 30_000;

/// A node that does not answer for so long is not waited for, in milliseconds.
const SILENCE_MS_MAX: u64 = 15_000;

/// So often a node may say that it still runs one batch; each time it says so after a second.
const EXTENSIONS_MAX: u32 = 300;

/// Pause before a call is repeated.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Interval of signs of life.
const LIFE_SIGN_INTERVAL: Duration = Duration::from_secs(1);

/// A directory stream gives so many bytes of entries at once.
const DIRECTORY_BYTES: u32 = 64 << 10;

/// A session. Ends by its lease if it is not closed.
pub(super) struct WriterSession {
    client: ClusterClient,
    address: String,
    tree: TreeRef,
    epoch: Epoch,
    sequence: u64,
    life_signs: JoinHandle<()>,
}

impl WriterSession {
    /// Opens a volume of a node, and waits so long for another writer to end.
    ///
    /// # Errors
    /// `LeaseHeld` while another writer uses it, what the node answers.
    pub(super) async fn open(
        client: &ClusterClient,
        node: &Advert,
        volume: VolumeId,
        wait: Duration,
    ) -> Result<Self> {
        let tree = TreeRef::Volume(volume);
        let call = OpenTree {
            tree: tree.clone(),
            agent: AgentId::random(),
            writable: true,
            yields: true,
            resumed_incarnation: None,
        };
        let until = Deadline::after(wait);
        let opened = loop {
            let opened =
                client.call_with_data(&node.address, call.clone(), Bytes::new(), CALL_TIMEOUT_MS);
            match opened.await {
                Ok((opened, _)) => break opened,
                Err(error) if !can_wait(&error) || until.remaining().is_zero() => {
                    return Err(error.into());
                }
                Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
            }
        };
        let (owner, address, epoch) = (client.clone(), node.address.clone(), opened.epoch);
        let life_signs = tokio::spawn(send_life_signs(owner, address, tree.clone(), epoch));
        Ok(Self {
            client: client.clone(),
            address: node.address.clone(),
            tree,
            epoch,
            sequence: 0,
            life_signs,
        })
    }

    /// Ends the session.
    pub(super) async fn close(self) {
        let call = CloseTree {
            tree: self.tree.clone(),
            epoch: self.epoch,
            lifetime_ms_min: 0,
        };
        // It would end by its lease.
        let _ = self.client.call(&self.address, call).await;
    }

    /// Runs operations, each once, however often they are sent.
    async fn run_all(&mut self, ops: Vec<FileOp>, body: Bytes) -> Result<Vec<FileResult>> {
        self.sequence += 1;
        let call = RunFileOps {
            tree: self.tree.clone(),
            epoch: self.epoch,
            sequence: self.sequence,
            after_sequence: None,
            caller: own_caller(),
            ops,
            assigned_numbers: Vec::new(),
        };
        let mut until = Deadline::after_ms(SILENCE_MS_MAX);
        let mut extensions_left = EXTENSIONS_MAX;
        loop {
            let (call, body) = (call.clone(), body.clone());
            let ran = self
                .client
                .call_with_data(&self.address, call, body, CALL_TIMEOUT_MS);
            match ran.await {
                Ok((results, _)) => return Ok(results.results),
                Err(error) if error.code == ErrorCode::SessionUnknown => {
                    let text = "the node was started again meanwhile; nothing was put";
                    return Err(Error::new(error.code, text).into());
                }
                Err(error) if error.code == ErrorCode::InProgress && extensions_left > 0 => {
                    until = Deadline::after_ms(SILENCE_MS_MAX);
                    extensions_left -= 1;
                }
                Err(error) if !error.is_transient() || until.remaining().is_zero() => {
                    return Err(error.into());
                }
                Err(_) => {}
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    async fn run(&mut self, op: FileOp) -> Result<FileResult> {
        let mut results = self.run_all(vec![op], Bytes::new()).await?;
        Ok(results.pop().unwrap_or(Err(Errno(HostErrno::EIO as i32))))
    }

    /// The attributes of a name of a directory, if it is there.
    pub(super) async fn look_up(&mut self, parent: InodeNo, name: &[u8]) -> Result<Option<Attr>> {
        let name = name.to_vec();
        match self
            .run(FileOp::Lookup {
                parent,
                name: name.clone(),
            })
            .await?
        {
            Ok(FileReply::Attr(attr)) => Ok(Some(attr)),
            Err(errno) if errno.0 == HostErrno::ENOENT as i32 => Ok(None),
            result => Err(operation_error(&name, result)),
        }
    }

    /// Makes a directory that only its user may enter for now.
    pub(super) async fn make_directory(&mut self, parent: InodeNo, name: &[u8]) -> Result<InodeNo> {
        let op = FileOp::MakeDirectory {
            parent,
            name: name.to_vec(),
            mode: 0o700,
        };
        match self.run(op).await? {
            Ok(FileReply::Attr(attr)) => Ok(attr.ino),
            result => Err(operation_error(name, result)),
        }
    }

    /// The directory at these names, made where it is not there.
    pub(super) async fn ensure_directory(&mut self, names: &[&[u8]]) -> Result<InodeNo> {
        let mut at = InodeNo::ROOT;
        for name in names {
            at = match self.look_up(at, name).await? {
                Some(found) if found.is_directory() => found.ino,
                Some(_) => {
                    let errno = Errno(HostErrno::ENOTDIR as i32);
                    return Err(operation_error(name, Err(errno)));
                }
                None => {
                    let made = self.make_directory(at, name).await?;
                    self.set_mode(made, 0o755).await?;
                    made
                }
            };
        }
        Ok(at)
    }

    /// Makes a symbolic link.
    pub(super) async fn make_symlink(
        &mut self,
        parent: InodeNo,
        name: &[u8],
        target: &[u8],
    ) -> Result<()> {
        let op = FileOp::MakeSymlink {
            parent,
            name: name.to_vec(),
            target: target.to_vec(),
        };
        self.run(op)
            .await?
            .map(drop)
            .map_err(|errno| operation_error(name, Err(errno)))
    }

    /// Creates a file, open for writing.
    pub(super) async fn create_file(
        &mut self,
        parent: InodeNo,
        name: &[u8],
        mode: u32,
    ) -> Result<HandleId> {
        let op = FileOp::Create {
            parent,
            name: name.to_vec(),
            mode: mode & 0o777,
            flags: OFlag::O_WRONLY.bits(),
        };
        match self.run(op).await? {
            Ok(FileReply::Opened { handle, .. }) => Ok(handle),
            result => Err(operation_error(name, result)),
        }
    }

    /// Writes bytes, at most a body, at an offset.
    ///
    /// # Errors
    /// A lack of space also where a part of them found room.
    pub(super) async fn write(
        &mut self,
        name: &[u8],
        handle: HandleId,
        offset: u64,
        bytes: Bytes,
    ) -> Result<()> {
        let (mut ops, mut start) = (Vec::new(), 0_u32);
        for piece in bytes.chunks(IO_BYTES_MAX as usize) {
            let length = u32::try_from(piece.len())?;
            ops.push(FileOp::Write {
                handle,
                offset: offset + u64::from(start),
                data: BodyRange { start, length },
                append: false,
            });
            start += length;
        }
        let lengths = ops.iter().map(|op| match op {
            FileOp::Write { data, .. } => u64::from(data.length),
            _ => 0,
        });
        let lengths: Vec<_> = lengths.collect();
        let results = self.run_all(ops, bytes).await?;
        for (result, expected) in results.into_iter().zip(lengths) {
            match result {
                Ok(FileReply::Written { length }) if length == expected => {}
                Ok(FileReply::Written { .. }) => {
                    let errno = Errno(HostErrno::ENOSPC as i32);
                    return Err(operation_error(name, Err(errno)));
                }
                result => return Err(operation_error(name, result)),
            }
        }
        Ok(())
    }

    /// Makes a file durable, and closes it.
    pub(super) async fn finish_file(&mut self, name: &[u8], handle: HandleId) -> Result<()> {
        let ops = vec![
            FileOp::Fsync {
                handle,
                data_only: false,
            },
            FileOp::Release { handle },
        ];
        let results = self.run_all(ops, Bytes::new()).await?;
        check_all(name, results)
    }

    /// Sets the permission bits of a directory.
    pub(super) async fn set_mode(&mut self, ino: InodeNo, mode: u32) -> Result<()> {
        let change = bafs_proto::file_op::AttrChange {
            mode: Some(mode & 0o777),
            ..Default::default()
        };
        let handle = None;
        let set = self
            .run(FileOp::SetAttr {
                ino,
                handle,
                change,
            })
            .await?;
        check_all(b"a directory", vec![set])
    }

    /// Makes the names in a directory durable.
    pub(super) async fn sync_directory(&mut self, ino: InodeNo) -> Result<()> {
        let synced = self.run(FileOp::FsyncDirectory { ino }).await?;
        check_all(b"a directory", vec![synced])
    }

    /// Renames over what is there, unless that is a directory.
    pub(super) async fn rename(
        &mut self,
        (parent, name): (InodeNo, &[u8]),
        (new_parent, new_name): (InodeNo, &[u8]),
    ) -> Result<()> {
        let op = FileOp::Rename {
            parent,
            name: name.to_vec(),
            new_parent,
            new_name: new_name.to_vec(),
            flags: 0,
        };
        let renamed = self.run(op).await?;
        check_all(new_name, vec![renamed])
    }

    /// Removes a name with everything below it; none there is fine.
    pub(super) async fn remove_all(&mut self, parent: InodeNo, name: &[u8]) -> Result<()> {
        let Some(top) = self.look_up(parent, name).await? else {
            return Ok(());
        };
        let mut directories = Vec::new();
        let mut left = VecDeque::from([(parent, name.to_vec(), top)]);
        while let Some((parent, name, attr)) = left.pop_front() {
            if !attr.is_directory() {
                let removed = self
                    .run(FileOp::Unlink {
                        parent,
                        name: name.clone(),
                    })
                    .await?;
                check_all(&name, vec![removed])?;
                continue;
            }
            self.set_mode(attr.ino, 0o700).await?;
            for below in self.list_directory(attr.ino).await? {
                if let Some(found) = self.look_up(attr.ino, &below).await? {
                    left.push_back((attr.ino, below, found));
                }
            }
            directories.push((parent, name));
        }
        for (parent, name) in directories.into_iter().rev() {
            let removed = self
                .run(FileOp::RemoveDirectory {
                    parent,
                    name: name.clone(),
                })
                .await?;
            check_all(&name, vec![removed])?;
        }
        Ok(())
    }

    async fn list_directory(&mut self, ino: InodeNo) -> Result<Vec<Vec<u8>>> {
        let name: &[u8] = b"a directory";
        let handle = match self.run(FileOp::OpenDirectory { ino }).await? {
            Ok(FileReply::Opened { handle, .. }) => handle,
            result => return Err(operation_error(name, result)),
        };
        let (mut names, mut cookie) = (Vec::new(), 0);
        loop {
            let op = FileOp::ReadDirectory {
                handle,
                cookie,
                bytes_max: DIRECTORY_BYTES,
                plus: false,
            };
            let entries = match self.run(op).await? {
                Ok(FileReply::Entries(entries)) => entries,
                result => return Err(operation_error(name, result)),
            };
            let Some(last) = entries.last() else { break };
            cookie = last.cookie;
            let own = entries.into_iter().map(|entry| entry.name);
            names.extend(own.filter(|name| name != b"." && name != b".."));
        }
        self.run(FileOp::ReleaseDirectory { handle }).await?.ok();
        Ok(names)
    }
}

impl Drop for WriterSession {
    fn drop(&mut self) {
        self.life_signs.abort();
    }
}

/// Tells the node that the writer lives, until the session ends.
async fn send_life_signs(client: ClusterClient, address: String, tree: TreeRef, epoch: Epoch) {
    loop {
        tokio::time::sleep(LIFE_SIGN_INTERVAL).await;
        let call = RunFileOps {
            tree: tree.clone(),
            epoch,
            sequence: 0,
            after_sequence: None,
            caller: own_caller(),
            ops: Vec::new(),
            assigned_numbers: Vec::new(),
        };
        // The next batch of the session hears what is wrong.
        let _ = client.call(&address, call).await;
    }
}

fn own_caller() -> Caller {
    Caller {
        uid: nix::unistd::getuid().as_raw(),
        gid: nix::unistd::getgid().as_raw(),
        pid: std::process::id(),
    }
}

fn can_wait(error: &Error) -> bool {
    matches!(
        error.code,
        ErrorCode::LeaseHeld | ErrorCode::Busy | ErrorCode::InProgress
    )
}

fn check_all(name: &[u8], results: Vec<FileResult>) -> Result<()> {
    for result in results {
        if result.is_err() {
            return Err(operation_error(name, result));
        }
    }
    Ok(())
}

/// What an operation says that did not do what it should.
fn operation_error(name: &[u8], result: FileResult) -> anyhow::Error {
    let name = bafs_proto::path::from_bytes(name);
    let errno = match result {
        Err(errno) => HostErrno::from_raw(errno.0),
        Ok(reply) => {
            let text = format!("'{name}': an answer of another kind: {reply:?}");
            return Error::new(ErrorCode::Malformed, text).into();
        }
    };
    let class = match errno {
        HostErrno::ENOSPC | HostErrno::EDQUOT => FailureClass::NoSpace,
        HostErrno::EEXIST | HostErrno::EISDIR | HostErrno::ENOTDIR | HostErrno::ENOTEMPTY => {
            FailureClass::Exists
        }
        HostErrno::ENOENT => FailureClass::NotFound,
        HostErrno::EACCES | HostErrno::EPERM => FailureClass::Denied,
        HostErrno::ENAMETOOLONG | HostErrno::EINVAL => FailureClass::InvalidUse,
        HostErrno::EIO => FailureClass::ServerFault,
        _ => FailureClass::Failed,
    };
    let name = bafs_proto::path::printable(&name).into_owned();
    ClassifiedError::from_message(class, format!("'{name}' in the volume: {}", errno.desc()))
}
