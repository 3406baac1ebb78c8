//! A writer's session beside a tree that runs each operation at once: the same operations on both,
//! chosen by dice, with the answers and the trees compared.
#![allow(clippy::unwrap_used, reason = "all of this is test")]

mod delegation_fixture;
mod trees;

use std::collections::BTreeMap;
use std::time::Duration;

use bafs_client::tree::Durability;
use bafs_proto::file_op::{
    Attr, AttrChange, BodyRange, Caller, Errno, FileOp, FileReply, FileResult, FileTime, SetTime,
};
use bafs_proto::ids::{HandleId, InodeNo};
use nix::libc;
use tokio::sync::oneshot;

pub(crate) use delegation_fixture::DelegationFixture;
use trees::{describe_tree, make_earlier_files};

/// Numbers that look random and are the same each time.
pub(crate) struct SeededRng(pub(crate) u64);

impl SeededRng {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// A tree that runs each operation at once: what the delegated one is compared with.
pub(crate) struct ReferenceTree {
    session: bafs_tree::Session,
    directory: tempfile::TempDir,
}

impl ReferenceTree {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let tree = bafs_tree::Tree::open(directory.path(), None).unwrap();
        Self {
            session: bafs_tree::Session::new(tree, true),
            directory,
        }
    }

    pub(crate) fn run(&self, op: &FileOp, data: &[u8]) -> (FileResult, Vec<u8>) {
        let mut out = Vec::new();
        let result = self.session.run(Caller::default(), op, data, &mut out);
        (result, out)
    }
}

/// Files and handles, which both sides number in their own way.
#[derive(Default)]
pub(crate) struct NumberPairs {
    files: Vec<(InodeNo, InodeNo)>,
    handles: Vec<(HandleId, HandleId, InodeNo)>,
    /// Handles that may write.
    writable: Vec<HandleId>,
}

pub(crate) struct DifferentialTest {
    pub(crate) fixture: DelegationFixture,
    pub(crate) reference: ReferenceTree,
    pairs: NumberPairs,
    /// Questions whose answers nobody has waited for yet.
    pending_queries: Vec<oneshot::Receiver<()>>,
    names: BTreeMap<(InodeNo, Vec<u8>), InodeNo>,
}

/// Space of a file's index, which depends on when the host's file system allocates, in blocks of
/// 512 bytes.
const INDEX_BLOCKS: u64 = 8;

fn assert_same_attr(one: &Attr, other: &Attr, asked: &FileOp) {
    let shape = |attr: &Attr| {
        let size = if attr.is_directory() { 0 } else { attr.size };
        (attr.mode, size, attr.nlink, attr.uid, attr.gid)
    };
    assert_eq!(shape(one), shape(other), "{asked:?}");
    if !one.is_directory() {
        let apart = one.blocks.abs_diff(other.blocks);
        assert!(apart <= INDEX_BLOCKS, "{asked:?}: {one:?}, {other:?}");
    }
}

impl DifferentialTest {
    pub(crate) async fn new() -> Self {
        let durability = Durability::OnSync;
        let fixture = DelegationFixture::with_files(durability, None, make_earlier_files).await;
        let reference = ReferenceTree::new();
        make_earlier_files(reference.directory.path());
        Self {
            fixture,
            reference,
            pairs: NumberPairs {
                files: vec![(InodeNo::ROOT, InodeNo::ROOT)],
                ..NumberPairs::default()
            },
            names: BTreeMap::new(),
            pending_queries: Vec::new(),
        }
    }

    /// Asks something that changes nothing, and goes on before it is answered.
    pub(crate) fn begin_query(&mut self, rng: &mut SeededRng) {
        let [ino, _] = self.random_file(rng);
        let op = match (rng.below(4), self.random_handle(rng)) {
            (0, _) => FileOp::StatFs,
            (1, Some((_, [handle, _]))) => FileOp::Fsync {
                handle,
                data_only: false,
            },
            _ => FileOp::GetAttr { ino, handle: None },
        };
        let (send, receive) = oneshot::channel();
        let done = move |_: FileResult, _: &[u8]| send.send(()).unwrap_or_default();
        let volume = &self.fixture.volume;
        volume.run(Caller::default(), op, &[], Box::new(done));
        self.pending_queries.push(receive);
    }

    /// Waits for the answers to all that was asked meanwhile.
    pub(crate) async fn await_queries(&mut self) {
        for receive in self.pending_queries.drain(..) {
            let heard = tokio::time::timeout(Duration::from_secs(20), receive).await;
            heard.expect("it is answered").unwrap();
        }
    }

    /// A page of a listing with those after it: a page ends where the server must be asked.
    async fn read_further_pages(&self, asked: &FileOp, first: FileResult) -> FileResult {
        let (FileOp::ReadDirectory { .. }, Ok(FileReply::Entries(mut all))) =
            (asked, first.clone())
        else {
            return first;
        };
        let mut next = asked.clone();
        while let (FileOp::ReadDirectory { cookie, .. }, Some(last)) = (&mut next, all.last()) {
            *cookie = last.cookie;
            match self.fixture.run(next.clone(), &[]).await.0? {
                FileReply::Entries(page) if page.is_empty() => break,
                FileReply::Entries(page) => all.extend(page),
                other => panic!("{other:?} to {next:?}"),
            }
        }
        Ok(FileReply::Entries(all))
    }

    /// Runs an operation on both sides; `op` gets the numbers of one side.
    pub(crate) async fn run_on_both(
        &mut self,
        op: impl Fn(usize) -> FileOp,
        data: &[u8],
    ) -> Result<(FileReply, FileReply), Errno> {
        let asked = op(0);
        let (own, own_data) = self.fixture.run(asked.clone(), data).await;
        let own = self.read_further_pages(&asked, own).await;
        let (other, other_data) = self.reference.run(&op(1), data);
        assert_eq!(own_data, other_data, "{asked:?}");
        match (own, other) {
            (Ok(own), Ok(other)) => {
                match (&own, &other) {
                    (FileReply::Attr(one), FileReply::Attr(two)) => {
                        assert_same_attr(one, two, &asked);
                    }
                    (FileReply::Opened { attr: one, .. }, FileReply::Opened { attr, .. }) => {
                        assert_same_attr(one, attr, &asked);
                    }
                    (FileReply::Entries(one), FileReply::Entries(two)) => {
                        let names = |entries: &[bafs_proto::file_op::DirectoryEntry]| {
                            let mut names: Vec<_> =
                                entries.iter().map(|entry| entry.name.clone()).collect();
                            names.sort();
                            names
                        };
                        assert_eq!(names(one), names(two), "{asked:?}");
                        for entry in one {
                            let mut others = two.iter();
                            let other = others.find(|other| other.name == entry.name).unwrap();
                            assert_eq!(entry.attr.is_some(), other.attr.is_some(), "{asked:?}");
                            if let (Some(attr), Some(other)) = (&entry.attr, &other.attr) {
                                assert_same_attr(attr, other, &asked);
                            }
                        }
                    }
                    (FileReply::StatFs(_), FileReply::StatFs(_)) => {}
                    (one, two) => assert_eq!(one, two, "{asked:?}"),
                }
                Ok((own, other))
            }
            (own, other) => {
                let loss = self.fixture.volume.health().loss();
                assert_eq!(
                    own.as_ref().err(),
                    other.as_ref().err(),
                    "{asked:?}, {loss:?}"
                );
                Err(own.unwrap_err())
            }
        }
    }

    /// How long the model's file is that a handle of ours belongs to.
    pub(crate) fn reference_file_end(&self, handle: HandleId) -> u64 {
        let NumberPairs { files, handles, .. } = &self.pairs;
        let opened = handles.iter().find(|(one, _, _)| *one == handle);
        let file = opened.and_then(|(_, _, open)| files.iter().find(|(one, _)| one == open));
        let &(_, ino) = file.expect("it is open");
        match self
            .reference
            .run(&FileOp::GetAttr { ino, handle: None }, &[])
            .0
        {
            Ok(FileReply::Attr(attr)) => attr.size,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn random_file(&self, rng: &mut SeededRng) -> [InodeNo; 2] {
        let (one, other) = self.pairs.files[rng.below(self.pairs.files.len() as u64) as usize];
        [one, other]
    }

    pub(crate) fn random_handle(&self, rng: &mut SeededRng) -> Option<(usize, [HandleId; 2])> {
        if self.pairs.handles.is_empty() {
            return None;
        }
        let at = rng.below(self.pairs.handles.len() as u64) as usize;
        let (one, other, _) = self.pairs.handles[at];
        Some((at, [one, other]))
    }

    pub(crate) fn record_lookup(
        &mut self,
        parent: InodeNo,
        name: &[u8],
        replies: &(FileReply, FileReply),
    ) {
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
        self.record_open(replies);
    }

    pub(crate) fn record_open(&mut self, replies: &(FileReply, FileReply)) {
        if let (FileReply::Opened { handle: one, attr }, FileReply::Opened { handle: other, .. }) =
            replies
        {
            self.pairs.handles.push((*one, *other, attr.ino));
        }
    }

    pub(crate) fn record_writable(&mut self) {
        let opened = self.pairs.handles.last().map(|(handle, _, _)| *handle);
        self.pairs.writable.extend(opened);
    }

    /// As the kernel does it before it makes or changes a name.
    pub(crate) async fn look_up(&mut self, parent: [InodeNo; 2], name: &[u8]) -> Option<InodeNo> {
        let op = |side: usize| FileOp::Lookup {
            parent: parent[side],
            name: name.to_vec(),
        };
        let replies = self.run_on_both(op, &[]).await.ok()?;
        self.record_lookup(parent[0], name, &replies);
        self.names.get(&(parent[0], name.to_vec())).copied()
    }

    #[expect(
        clippy::too_many_lines,
        reason = "a table: one branch for each kind of operation"
    )]
    pub(crate) async fn random_step(&mut self, rng: &mut SeededRng, keeps_open_names: bool) {
        let names = ["a", "b", "c", "d", "e"];
        let name = names[rng.below(5) as usize].as_bytes().to_vec();
        let parent = self.random_file(rng);
        match rng.below(15) {
            0..=2 => {
                if self.look_up(parent, &name).await.is_some() {
                    return;
                }
                let mode = 0o100_600 + rng.below(0o200) as u32;
                let op = |side: usize| FileOp::Create {
                    parent: parent[side],
                    name: name.clone(),
                    mode,
                    flags: libc::O_RDWR,
                };
                if let Ok(replies) = self.run_on_both(op, &[]).await {
                    self.record_lookup(parent[0], &name, &replies);
                    self.record_writable();
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
                if let Ok(replies) = self.run_on_both(op, &[]).await {
                    self.record_lookup(parent[0], &name, &replies);
                }
            }
            4 => {
                // What is gone cannot be told about over a restart.
                self.await_queries().await;
                let Some(ino) = self.look_up(parent, &name).await else {
                    return;
                };
                let is_open = self.pairs.handles.iter().any(|(_, _, open)| *open == ino);
                if keeps_open_names && is_open {
                    return;
                }
                let is_directory = rng.below(3) == 0;
                let op = |side: usize| {
                    let (parent, name) = (parent[side], name.clone());
                    if is_directory {
                        FileOp::RemoveDirectory { parent, name }
                    } else {
                        FileOp::Unlink { parent, name }
                    }
                };
                if self.run_on_both(op, &[]).await.is_ok() {
                    self.names.remove(&(parent[0], name));
                    let is_gone = !self.names.values().any(|known| *known == ino);
                    if is_gone && !is_open {
                        self.pairs.files.retain(|(known, _)| *known != ino);
                    }
                }
            }
            5..=6 => {
                let Some((_, handle)) = self.random_handle(rng) else {
                    return;
                };
                if !self.pairs.writable.contains(&handle[0]) {
                    return;
                }
                let length = rng.below(9000) as u32;
                let data = BodyRange { start: 0, length };
                let append = rng.below(3) == 0;
                // The kernel says where it believes the end to be.
                let offset = match append {
                    true => self.reference_file_end(handle[0]),
                    false => rng.below(12_000),
                };
                let op = |side: usize| FileOp::Write {
                    handle: handle[side],
                    offset,
                    data,
                    append,
                };
                let bytes = vec![rng.below(256) as u8; length as usize];
                let _ = self.run_on_both(op, &bytes).await;
            }
            7 => {
                let Some((_, handle)) = self.random_handle(rng) else {
                    return;
                };
                let offset = rng.below(2) * rng.below(10_000);
                let op = |side: usize| FileOp::Read {
                    handle: handle[side],
                    offset,
                    length: 8000,
                };
                let _ = self.run_on_both(op, &[]).await;
            }
            8 => {
                let Some((at, handle)) = self.random_handle(rng) else {
                    return;
                };
                self.await_queries().await;
                self.pairs.handles.remove(at);
                let op = |side: usize| FileOp::Release {
                    handle: handle[side],
                };
                let _ = self.run_on_both(op, &[]).await;
            }
            9 => {
                let flags = [libc::O_RDONLY, libc::O_RDWR][rng.below(2) as usize];
                let op = |side: usize| FileOp::Open {
                    ino: parent[side],
                    flags,
                };
                if let Ok(replies) = self.run_on_both(op, &[]).await {
                    self.record_open(&replies);
                    if flags == libc::O_RDWR {
                        self.record_writable();
                    }
                }
            }
            10 => {
                let size = (rng.below(2) == 0).then(|| rng.below(20_000));
                let mtime = FileTime {
                    seconds: rng.below(1_000_000) as i64,
                    nanoseconds: 7,
                };
                let change = AttrChange {
                    mode: Some(0o600 + rng.below(0o200) as u32),
                    size,
                    mtime: Some(SetTime::At(mtime)),
                    ..AttrChange::default()
                };
                let op = |side: usize| FileOp::SetAttr {
                    ino: parent[side],
                    handle: None,
                    change,
                };
                let _ = self.run_on_both(op, &[]).await;
            }
            13 => {
                let ino = self.random_file(rng);
                if self.look_up(parent, &name).await.is_some() {
                    return;
                }
                let op = |side: usize| FileOp::MakeLink {
                    ino: ino[side],
                    parent: parent[side],
                    name: name.clone(),
                };
                if let Ok(replies) = self.run_on_both(op, &[]).await {
                    self.record_lookup(parent[0], &name, &replies);
                }
            }
            11 => {
                self.await_queries().await;
                let new_parent = self.random_file(rng);
                let new_name = names[rng.below(5) as usize].as_bytes().to_vec();
                let moved = self.look_up(parent, &name).await;
                let victim = self.look_up(new_parent, &new_name).await;
                let open = |ino| self.pairs.handles.iter().any(|(_, _, open)| *open == ino);
                // Two names of one file: the kernel itself leaves both.
                if moved.is_none() || moved == victim {
                    return;
                }
                if keeps_open_names && victim.is_some_and(open) {
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
                if self.run_on_both(op, &[]).await.is_ok() && moved != victim {
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
                let _ = self.run_on_both(op, &[]).await;
            }
            _ => {
                let op = |side: usize| FileOp::OpenDirectory { ino: parent[side] };
                let Ok(replies) = self.run_on_both(op, &[]).await else {
                    return;
                };
                self.record_open(&replies);
                let (one, other, _) = self.pairs.handles.pop().unwrap();
                let handle = [one, other];
                let plus = rng.below(2) == 0;
                let op = |side: usize| FileOp::ReadDirectory {
                    handle: handle[side],
                    cookie: 0,
                    bytes_max: 32 << 10,
                    plus,
                };
                let _ = self.run_on_both(op, &[]).await;
                let op = |side: usize| FileOp::ReleaseDirectory {
                    handle: handle[side],
                };
                let _ = self.run_on_both(op, &[]).await;
            }
        }
    }

    pub(crate) async fn finish(mut self) {
        self.await_queries().await;
        self.fixture.flush().await;
        assert!(self.fixture.volume.health().loss().is_none());
        let (own, other) = (
            self.fixture.directory.path(),
            self.reference.directory.path(),
        );
        assert_eq!(describe_tree(own), describe_tree(other));
        self.fixture.volume.close(0).await;
    }
}
