//! The one writer of a volume, answered before its server has run what it asked: the same answers
//! and the same tree as a directory gives, over restarts of the server too.
#![allow(clippy::unwrap_used, reason = "all of this is test")]

mod serving;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bafs_client::fate::{Fate, Loss};
use bafs_client::tree::{RemoteTree, Tree};
use bafs_client::usage::Usage;
use bafs_client::volume::{Mode, Ownership, Volume};
use bafs_proto::file_op::{
    Attr, AttrChange, BodyRange, Caller, Errno, FileOp, FileReply, FileResult, FileTime, SetTime,
};
use bafs_proto::ids::{AgentId, HandleId, InodeNo};
use bafs_proto::message::TreeRef;
use nix::libc;
use serving::{Fake, Fault, VOLUME};
use tokio::sync::{mpsc, oneshot};

/// Numbers that look random and are the same each time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

struct World {
    server: Arc<Fake>,
    volume: Arc<Volume>,
    _losses: mpsc::UnboundedReceiver<Loss>,
    directory: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let server = Fake::new(directory.path());
        let (sender, losses) = mpsc::unbounded_channel();
        let fate = Fate::new("work", sender);
        let (called, agent) = (server.server(5_000), AgentId::random());
        let tree = RemoteTree::open(called, TreeRef::Volume(VOLUME), agent, true, fate.clone())
            .await
            .unwrap();
        tree.delegate().await;
        let (mode, ownership) = (Mode::scratch(true), Ownership::AsStored);
        let tree = Tree::Remote(tree);
        let volume = Volume::new("work", tree, mode, ownership, fate, Usage::new());
        Self {
            server,
            volume: Arc::new(volume),
            _losses: losses,
            directory,
        }
    }

    async fn run(&self, op: FileOp, data: &[u8]) -> (FileResult, Vec<u8>) {
        let (send, receive) = oneshot::channel();
        let done = move |result, data: &[u8]| drop(send.send((result, data.to_vec())));
        self.volume.run(Caller::default(), op, data, Box::new(done));
        let answered = tokio::time::timeout(Duration::from_secs(20), receive).await;
        answered.expect("it is answered").unwrap()
    }

    async fn flush(&self) {
        self.run(FileOp::StatFs, &[]).await.0.unwrap();
    }
}

/// A tree that runs each operation at once: what the delegated one is compared with.
struct Model {
    session: bafs_tree::Session,
    directory: tempfile::TempDir,
}

impl Model {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let tree = bafs_tree::Tree::open(directory.path(), None).unwrap();
        Self {
            session: tree.session(true),
            directory,
        }
    }

    fn run(&self, op: &FileOp, data: &[u8]) -> (FileResult, Vec<u8>) {
        let mut out = Vec::new();
        let result = self.session.run(Caller::default(), op, data, &mut out);
        (result, out)
    }
}

/// Files and handles, which both sides number in their own way.
#[derive(Default)]
struct Pairs {
    files: Vec<(InodeNo, InodeNo)>,
    handles: Vec<(HandleId, HandleId, InodeNo)>,
    /// Handles that may write.
    writable: Vec<HandleId>,
}

struct Both {
    world: World,
    model: Model,
    pairs: Pairs,
    names: BTreeMap<(InodeNo, Vec<u8>), InodeNo>,
}

fn shape(attr: &Attr) -> (u32, u64, u64, u32, u32, u32) {
    let size = if attr.mode & 0o170_000 == 0o040_000 {
        0
    } else {
        attr.size
    };
    let blocks = if size == 0 { 0 } else { attr.blocks };
    (attr.mode, size, blocks, attr.nlink, attr.uid, attr.gid)
}

impl Both {
    async fn new() -> Self {
        Self {
            world: World::new().await,
            model: Model::new(),
            pairs: Pairs {
                files: vec![(InodeNo::ROOT, InodeNo::ROOT)],
                ..Pairs::default()
            },
            names: BTreeMap::new(),
        }
    }

    /// Runs an operation on both sides; `op` gets the numbers of one side.
    async fn both(
        &mut self,
        op: impl Fn(usize) -> FileOp,
        data: &[u8],
    ) -> Result<(FileReply, FileReply), Errno> {
        let asked = op(0);
        let (own, own_data) = self.world.run(asked.clone(), data).await;
        let (other, other_data) = self.model.run(&op(1), data);
        assert_eq!(own_data, other_data, "{asked:?}");
        match (own, other) {
            (Ok(own), Ok(other)) => {
                match (&own, &other) {
                    (FileReply::Attr(one), FileReply::Attr(two)) => {
                        assert_eq!(shape(one), shape(two), "{asked:?}");
                    }
                    (FileReply::Opened { attr: one, .. }, FileReply::Opened { attr, .. }) => {
                        assert_eq!(shape(one), shape(attr), "{asked:?}");
                    }
                    (FileReply::Entries(one), FileReply::Entries(two)) => {
                        let names = |entries: &[bafs_proto::file_op::DirectoryEntry]| {
                            let mut names: Vec<_> =
                                entries.iter().map(|entry| entry.name.clone()).collect();
                            names.sort();
                            names
                        };
                        assert_eq!(names(one), names(two), "{asked:?}");
                    }
                    (FileReply::StatFs(_), FileReply::StatFs(_)) => {}
                    (one, two) => assert_eq!(one, two, "{asked:?}"),
                }
                Ok((own, other))
            }
            (own, other) => {
                let loss = self.world.volume.fate().loss();
                assert_eq!(
                    own.as_ref().err(),
                    other.as_ref().err(),
                    "{asked:?}, {loss:?}"
                );
                Err(own.unwrap_err())
            }
        }
    }

    fn file(&self, dice: &mut Dice) -> [InodeNo; 2] {
        let (one, other) = self.pairs.files[dice.below(self.pairs.files.len() as u64) as usize];
        [one, other]
    }

    fn handle(&self, dice: &mut Dice) -> Option<(usize, [HandleId; 2])> {
        if self.pairs.handles.is_empty() {
            return None;
        }
        let at = dice.below(self.pairs.handles.len() as u64) as usize;
        let (one, other, _) = self.pairs.handles[at];
        Some((at, [one, other]))
    }

    fn met(&mut self, parent: InodeNo, name: &[u8], replies: &(FileReply, FileReply)) {
        let attr = |reply: &FileReply| match reply {
            FileReply::Attr(attr) | FileReply::Opened { attr, .. } => Some(attr.ino),
            _ => None,
        };
        if let (Some(one), Some(other)) = (attr(&replies.0), attr(&replies.1)) {
            if !self.pairs.files.contains(&(one, other)) {
                assert!(
                    !self.pairs.files.iter().any(|(known, _)| *known == one),
                    "a number was given twice"
                );
                self.pairs.files.push((one, other));
            }
            self.names.insert((parent, name.to_vec()), one);
        }
        self.opened(replies);
    }

    fn opened(&mut self, replies: &(FileReply, FileReply)) {
        if let (FileReply::Opened { handle: one, attr }, FileReply::Opened { handle: other, .. }) =
            replies
        {
            self.pairs.handles.push((*one, *other, attr.ino));
        }
    }

    fn may_write(&mut self) {
        let opened = self.pairs.handles.last().map(|(handle, _, _)| *handle);
        self.pairs.writable.extend(opened);
    }

    /// As the kernel does it before it makes or changes a name.
    async fn look_up(&mut self, parent: [InodeNo; 2], name: &[u8]) -> Option<InodeNo> {
        let op = |side: usize| FileOp::Lookup {
            parent: parent[side],
            name: name.to_vec(),
        };
        let replies = self.both(op, &[]).await.ok()?;
        self.met(parent[0], name, &replies);
        self.names.get(&(parent[0], name.to_vec())).copied()
    }

    #[expect(
        clippy::too_many_lines,
        reason = "a table: one branch for each kind of operation"
    )]
    async fn step(&mut self, dice: &mut Dice, keeps_open_names: bool) {
        let names = ["a", "b", "c", "d", "e"];
        let name = names[dice.below(5) as usize].as_bytes().to_vec();
        let parent = self.file(dice);
        match dice.below(14) {
            0..=2 => {
                if self.look_up(parent, &name).await.is_some() {
                    return;
                }
                let mode = 0o100_600 + dice.below(0o200) as u32;
                let op = |side: usize| FileOp::Create {
                    parent: parent[side],
                    name: name.clone(),
                    mode,
                    flags: libc::O_RDWR,
                };
                if let Ok(replies) = self.both(op, &[]).await {
                    self.met(parent[0], &name, &replies);
                    self.may_write();
                }
            }
            3 => {
                if self.look_up(parent, &name).await.is_some() {
                    return;
                }
                let op = |side: usize| FileOp::MakeDirectory {
                    parent: parent[side],
                    name: name.clone(),
                    mode: 0o755,
                };
                if let Ok(replies) = self.both(op, &[]).await {
                    self.met(parent[0], &name, &replies);
                }
            }
            4 => {
                let Some(ino) = self.look_up(parent, &name).await else {
                    return;
                };
                let is_open = self.pairs.handles.iter().any(|(_, _, open)| *open == ino);
                if keeps_open_names && is_open {
                    return;
                }
                let is_directory = dice.below(3) == 0;
                let op = |side: usize| {
                    let (parent, name) = (parent[side], name.clone());
                    if is_directory {
                        FileOp::RemoveDirectory { parent, name }
                    } else {
                        FileOp::Unlink { parent, name }
                    }
                };
                if self.both(op, &[]).await.is_ok() {
                    self.names.remove(&(parent[0], name));
                    let is_gone = !self.names.values().any(|known| *known == ino);
                    if is_gone && !is_open {
                        self.pairs.files.retain(|(known, _)| *known != ino);
                    }
                }
            }
            5..=6 => {
                let Some((_, handle)) = self.handle(dice) else {
                    return;
                };
                if !self.pairs.writable.contains(&handle[0]) {
                    return;
                }
                let length = dice.below(9000) as u32;
                let offset = dice.below(12_000);
                let data = BodyRange { start: 0, length };
                let append = dice.below(3) == 0;
                let op = |side: usize| FileOp::Write {
                    handle: handle[side],
                    offset,
                    data,
                    append: append && !keeps_open_names,
                };
                let bytes = vec![dice.below(256) as u8; length as usize];
                let _ = self.both(op, &bytes).await;
            }
            7 => {
                let Some((_, handle)) = self.handle(dice) else {
                    return;
                };
                let offset = dice.below(10_000);
                let op = |side: usize| FileOp::Read {
                    handle: handle[side],
                    offset,
                    length: 8000,
                };
                let _ = self.both(op, &[]).await;
            }
            8 => {
                let Some((at, handle)) = self.handle(dice) else {
                    return;
                };
                self.pairs.handles.remove(at);
                let op = |side: usize| FileOp::Release {
                    handle: handle[side],
                };
                let _ = self.both(op, &[]).await;
            }
            9 => {
                let flags = [libc::O_RDONLY, libc::O_RDWR][dice.below(2) as usize];
                let op = |side: usize| FileOp::Open {
                    ino: parent[side],
                    flags,
                };
                if let Ok(replies) = self.both(op, &[]).await {
                    self.opened(&replies);
                    if flags == libc::O_RDWR {
                        self.may_write();
                    }
                }
            }
            10 => {
                let size = (dice.below(2) == 0).then(|| dice.below(20_000));
                let mtime = FileTime {
                    seconds: dice.below(1_000_000) as i64,
                    nanoseconds: 7,
                };
                let change = AttrChange {
                    mode: Some(0o600 + dice.below(0o200) as u32),
                    size,
                    mtime: Some(SetTime::At(mtime)),
                    ..AttrChange::default()
                };
                let op = |side: usize| FileOp::SetAttr {
                    ino: parent[side],
                    handle: None,
                    change,
                };
                let _ = self.both(op, &[]).await;
            }
            11 => {
                let new_parent = self.file(dice);
                let new_name = names[dice.below(5) as usize].as_bytes().to_vec();
                let moved = self.look_up(parent, &name).await;
                let victim = self.look_up(new_parent, &new_name).await;
                let open = |ino| self.pairs.handles.iter().any(|(_, _, open)| *open == ino);
                if moved.is_none() || keeps_open_names && victim.is_some_and(open) {
                    return;
                }
                let is_victim_open = victim.is_some_and(open);
                let op = |side: usize| FileOp::Rename {
                    parent: parent[side],
                    name: name.clone(),
                    new_parent: new_parent[side],
                    new_name: new_name.clone(),
                    flags: 0,
                };
                if self.both(op, &[]).await.is_ok() && moved != victim {
                    self.names.remove(&(parent[0], name));
                    self.names.insert((new_parent[0], new_name), moved.unwrap());
                    if let Some(victim) = victim
                        && !is_victim_open
                        && !self.names.values().any(|known| *known == victim)
                    {
                        self.pairs.files.retain(|(known, _)| *known != victim);
                    }
                }
            }
            12 => {
                let op = |side: usize| FileOp::GetAttr {
                    ino: parent[side],
                    handle: None,
                };
                let _ = self.both(op, &[]).await;
            }
            _ => {
                let op = |side: usize| FileOp::OpenDirectory { ino: parent[side] };
                let Ok(replies) = self.both(op, &[]).await else {
                    return;
                };
                self.opened(&replies);
                let (one, other, _) = self.pairs.handles.pop().unwrap();
                let handle = [one, other];
                let op = |side: usize| FileOp::ReadDirectory {
                    handle: handle[side],
                    cookie: 0,
                    bytes_max: 32 << 10,
                    plus: false,
                };
                let _ = self.both(op, &[]).await;
                let op = |side: usize| FileOp::ReleaseDirectory {
                    handle: handle[side],
                };
                let _ = self.both(op, &[]).await;
            }
        }
    }

    async fn end(self) {
        self.world.flush().await;
        assert!(self.world.volume.fate().loss().is_none());
        let (own, other) = (self.world.directory.path(), self.model.directory.path());
        assert_eq!(described(own), described(other));
        self.world.volume.close().await;
    }
}

/// Every path with mode, links, size and content.
fn described(root: &Path) -> BTreeMap<String, (u32, u64, Vec<u8>)> {
    let mut all = BTreeMap::new();
    let mut pending = vec![root.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            let content = if metadata.is_dir() {
                pending.push(path.clone());
                Vec::new()
            } else {
                std::fs::read(&path).unwrap()
            };
            let name = path
                .strip_prefix(root)
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned();
            all.insert(name, (metadata.mode(), metadata.nlink(), content));
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_answered_early_is_what_a_directory_answers() {
    for seed in 0..30 {
        let (mut both, mut dice) = (Both::new().await, Dice(seed));
        for _ in 0..300 {
            both.step(&mut dice, false).await;
        }
        both.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_answered_early_outlives_restarts_of_the_server() {
    for seed in 100..140 {
        let (mut both, mut dice) = (Both::new().await, Dice(seed));
        for _ in 0..200 {
            if dice.below(12) == 0 {
                let runs = dice.below(2) == 0;
                both.world.server.set(Fault::Restart { runs });
            }
            both.step(&mut dice, true).await;
        }
        both.end().await;
    }
}
