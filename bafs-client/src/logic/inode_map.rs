//! What the kernel knows of a tree behind a server: files by number, their names, open handles.
//! It is what a session is made again from after a restart of the server. Asks nobody.

use std::collections::BTreeMap;

use bafs_proto::file_op::{Attr, ByName, FileOp};
use bafs_proto::ids::{Epoch, HandleId, InodeNo};
use bafs_proto::limits::{AGENT_NUMBER_FIRST, EARLY_HANDLES_MAX};

/// No session has this number.
const NEVER_OPENED: Epoch = Epoch(0);

/// Names remembered for one file: enough for the usual hard links.
const NAMES_PER_FILE_MAX: usize = 8;

/// Files and handles, by the numbers that the kernel has for them.
#[derive(Debug)]
pub struct InodeMap {
    epoch: Epoch,
    files: BTreeMap<InodeNo, InodeEntry>,
    inodes_by_name: BTreeMap<(InodeNo, ByName), InodeNo>,
    /// The files that the present session knows, by its numbers.
    inodes_by_server: BTreeMap<InodeNo, InodeNo>,
    handles: BTreeMap<HandleId, OpenHandle>,
    last_handle: u64,
    /// While so many are open, whoever opened them, more are opened by the server.
    early_handles_max: u32,
    allocated_count: u64,
}

#[derive(Debug, Default)]
struct InodeEntry {
    /// As the kernel counts.
    references: u64,
    names: Vec<(InodeNo, ByName)>,
    born_ns: u64,
    session_inode: Option<SessionInode>,
}

/// Where a session has a file.
#[derive(Debug, Clone, Copy)]
struct SessionInode {
    epoch: Epoch,
    ino: InodeNo,
    /// As the session counts.
    references: u64,
}

#[derive(Debug, Clone, Copy)]
struct OpenHandle {
    ino: InodeNo,
    flags: i32,
    is_directory: bool,
    session_handle: (Epoch, HandleId),
}

/// Something that the present session does not have yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingObject {
    /// A file, which must be looked up again.
    File(InodeNo),
    /// An open file or directory, which must be opened again.
    Handle(HandleId),
}

/// How to find a file again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InodeRoute {
    /// The present session has it under this number.
    Present(InodeNo),
    /// Look this name up in this directory, whose own way comes first.
    ByName(InodeNo, ByName),
    /// No name leads to it any more.
    Unreachable,
}

/// What opens a handle again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenParameters {
    /// The file.
    pub ino: InodeNo,
    /// How it was opened.
    pub flags: i32,
    /// Whether it is a directory.
    pub is_directory: bool,
}

impl InodeMap {
    /// What is known at the start of a session: the root.
    pub fn new(epoch: Epoch) -> Self {
        let mut known = Self {
            epoch,
            files: BTreeMap::new(),
            inodes_by_name: BTreeMap::new(),
            inodes_by_server: BTreeMap::new(),
            handles: BTreeMap::new(),
            last_handle: 0,
            early_handles_max: EARLY_HANDLES_MAX,
            allocated_count: 0,
        };
        known.files.insert(InodeNo::ROOT, InodeEntry::default());
        known.begin_session(epoch);
        known
    }

    /// A new session begins: it has the root and nothing else.
    pub fn begin_session(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.inodes_by_server.clear();
        self.bind_to_session(InodeNo::ROOT, InodeNo::ROOT);
    }

    /// The present session keeps descriptors for so many files that are opened before it does.
    pub fn set_early_handles_max(&mut self, handles: u32) {
        self.early_handles_max = handles;
    }

    /// The session that the numbers belong to.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The operation with the present session's numbers.
    ///
    /// # Errors
    /// What the session must be given first.
    pub fn translate(&self, op: &FileOp) -> Result<FileOp, MissingObject> {
        let mut op = op.clone();
        let mut missing = None;
        visit_inodes(&mut op, |ino| match self.session_inode(*ino) {
            None => missing = Some(MissingObject::File(*ino)),
            Some(place) => *ino = place.ino,
        });
        visit_handles(&mut op, |handle| match self.handles.get(handle) {
            Some(open) if open.session_handle.0 == self.epoch => *handle = open.session_handle.1,
            _ => missing = Some(MissingObject::Handle(*handle)),
        });
        missing.map_or(Ok(op), Err)
    }

    /// Whether the present session has a file.
    pub fn is_present(&self, ino: InodeNo) -> bool {
        self.session_inode(ino).is_some()
    }

    /// Whether a program has a file open, or believes so.
    pub fn is_open(&self, ino: InodeNo) -> bool {
        self.handles.values().any(|handle| handle.ino == ino)
    }

    /// How to find a file.
    pub fn route(&self, ino: InodeNo) -> InodeRoute {
        if let Some(place) = self.session_inode(ino) {
            return InodeRoute::Present(place.ino);
        }
        let names = self.files.get(&ino).map_or(&[][..], |file| &file.names);
        let leads = |name: &&(InodeNo, ByName)| self.files.contains_key(&name.0);
        match names.iter().find(leads) {
            Some((parent, name)) => InodeRoute::ByName(*parent, name.clone()),
            None => InodeRoute::Unreachable,
        }
    }

    /// The file that a name was last seen to lead to.
    pub fn inode_by_name(&self, parent: InodeNo, name: &ByName) -> Option<InodeNo> {
        self.inodes_by_name.get(&(parent, name.clone())).copied()
    }

    /// The directory in which a file was seen.
    pub fn parent_of(&self, ino: InodeNo) -> Option<InodeNo> {
        let (parent, _) = self.files.get(&ino)?.names.first()?;
        Some(*parent)
    }

    /// The file that the present session has under a number.
    pub fn inode_by_server(&self, ino: InodeNo) -> Option<InodeNo> {
        self.inodes_by_server.get(&ino).copied()
    }

    /// Takes note that a name led to a file once more, for nobody but us. Whether it is the file
    /// that the kernel knows by `ino`.
    pub fn rebind_found(&mut self, ino: InodeNo, attr: &Attr) -> bool {
        let other = self
            .inodes_by_server
            .get(&attr.ino)
            .is_some_and(|known| *known != ino);
        let Some(file) = self.files.get(&ino) else {
            return false;
        };
        // A spare number was given by one session and means nothing to the next.
        let renumbered =
            ino.0 < AGENT_NUMBER_FIRST && attr.ino.0 < AGENT_NUMBER_FIRST && ino != attr.ino;
        if other || renumbered || !is_same_birth(file.born_ns, attr.btime_ns) {
            return false;
        }
        self.bind_to_session(ino, attr.ino);
        self.count_session_reference(ino);
        true
    }

    /// The kernel learns that a name leads to what the session calls `attr.ino`; the answer is
    /// the kernel's number.
    pub fn record_lookup(&mut self, parent: InodeNo, name: &ByName, attr: &Attr) -> InodeNo {
        let ino = match self.inodes_by_server.get(&attr.ino) {
            Some(ino) => *ino,
            None => match self.find_renumbered(parent, name, attr) {
                Some(ino) => {
                    self.bind_to_session(ino, attr.ino);
                    ino
                }
                None => self.record_new_inode(attr),
            },
        };
        self.count_session_reference(ino);
        if let Some(file) = self.files.get_mut(&ino) {
            file.references += 1;
        }
        self.add_name(parent, name, ino);
        ino
    }

    /// A file that has a number of ours or of an earlier session's, and that the present one has
    /// under another number: its name and its birth tell.
    fn find_renumbered(&self, parent: InodeNo, name: &ByName, attr: &Attr) -> Option<InodeNo> {
        let ino = self.inode_by_name(parent, name)?;
        let file = self.files.get(&ino)?;
        let is_of_before = file
            .session_inode
            .is_none_or(|place| place.epoch != self.epoch);
        let is_same = ino.0 >= AGENT_NUMBER_FIRST && is_same_birth(file.born_ns, attr.btime_ns);
        (is_of_before && is_same).then_some(ino)
    }

    /// A file that the present session has shown for the first time.
    fn record_new_inode(&mut self, attr: &Attr) -> InodeNo {
        let mut ino = attr.ino;
        if let Some(file) = self.files.get(&ino) {
            // Known from an earlier session, if it can still be there.
            let same = !file.names.is_empty() && is_same_birth(file.born_ns, attr.btime_ns);
            if !same
                || file
                    .session_inode
                    .is_some_and(|place| place.epoch == self.epoch)
            {
                ino = self.allocate_inode();
            }
        }
        let file = self.files.entry(ino).or_default();
        file.born_ns = attr.btime_ns;
        self.bind_to_session(ino, attr.ino);
        ino
    }

    fn allocate_inode(&mut self) -> InodeNo {
        loop {
            let ino = InodeNo(AGENT_NUMBER_FIRST + self.allocated_count);
            self.allocated_count += 1;
            if !self.files.contains_key(&ino) {
                return ino;
            }
        }
    }

    /// The present session has a file under a number; what it had for it before is no more.
    /// Gives that number, and how many references the session counts there.
    fn bind_to_session(&mut self, ino: InodeNo, server: InodeNo) -> Option<(InodeNo, u64)> {
        let epoch = self.epoch;
        let file = self.files.get_mut(&ino)?;
        let before = file.session_inode.filter(|place| place.epoch == epoch);
        if before.is_none_or(|place| place.ino != server) {
            file.session_inode = Some(SessionInode {
                epoch,
                ino: server,
                references: 0,
            });
        }
        self.inodes_by_server.insert(server, ino);
        let SessionInode {
            ino: number,
            references,
            ..
        } = before.filter(|place| place.ino != server)?;
        if self.inodes_by_server.get(&number) == Some(&ino) {
            self.inodes_by_server.remove(&number);
        }
        Some((number, references))
    }

    fn count_session_reference(&mut self, ino: InodeNo) {
        if let Some(place) = self
            .files
            .get_mut(&ino)
            .and_then(|file| file.session_inode.as_mut())
        {
            place.references += 1;
        }
    }

    fn add_name(&mut self, parent: InodeNo, name: &ByName, ino: InodeNo) {
        let key = (parent, name.clone());
        match self.inodes_by_name.insert(key.clone(), ino) {
            Some(before) if before == ino => return,
            Some(before) => self.drop_name(before, &key),
            None => {}
        }
        if let Some(file) = self.files.get_mut(&ino) {
            file.names.push(key);
            if file.names.len() > NAMES_PER_FILE_MAX {
                let oldest = file.names.remove(0);
                self.inodes_by_name.remove(&oldest);
            }
        }
    }

    fn drop_name(&mut self, ino: InodeNo, key: &(InodeNo, ByName)) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.names.retain(|name| name != key);
        }
    }

    /// A name was removed.
    pub fn remove_name(&mut self, parent: InodeNo, name: &ByName) {
        let key = (parent, name.clone());
        if let Some(ino) = self.inodes_by_name.remove(&key) {
            self.drop_name(ino, &key);
        }
    }

    /// A name became another one, which it replaced or changed places with.
    pub fn rename(
        &mut self,
        (parent, name): (InodeNo, &ByName),
        (new_parent, new_name): (InodeNo, &ByName),
        exchanges: bool,
    ) {
        let (moved, other) = (
            self.inode_by_name(parent, name),
            self.inode_by_name(new_parent, new_name),
        );
        self.remove_name(parent, name);
        self.remove_name(new_parent, new_name);
        if let Some(ino) = moved {
            self.add_name(new_parent, new_name, ino);
        }
        if let Some(ino) = other.filter(|_| exchanges) {
            self.add_name(parent, name, ino);
        }
    }

    /// The kernel drops references. What the server is told: its number of the file, and how
    /// many references it drops.
    pub fn forget(&mut self, ino: InodeNo, count: u64) -> Option<(InodeNo, u64)> {
        let file = self.files.get_mut(&ino)?;
        file.references = file.references.saturating_sub(count);
        if file.references > 0 || ino == InodeNo::ROOT {
            return None;
        }
        let file = self.files.remove(&ino)?;
        for key in &file.names {
            if self.inodes_by_name.get(key) == Some(&ino) {
                self.inodes_by_name.remove(key);
            }
        }
        let place = file
            .session_inode
            .filter(|place| place.epoch == self.epoch)?;
        self.inodes_by_server.remove(&place.ino);
        Some((place.ino, place.references))
    }

    /// A file was opened; the answer is the kernel's handle.
    pub fn add_handle(&mut self, opening: OpenParameters, handle: HandleId) -> HandleId {
        self.last_handle += 1;
        let OpenParameters {
            ino,
            flags,
            is_directory,
        } = opening;
        let open = OpenHandle {
            ino,
            flags,
            is_directory,
            session_handle: (self.epoch, handle),
        };
        self.handles.insert(HandleId(self.last_handle), open);
        HandleId(self.last_handle)
    }

    /// A file was made that the session will know by the number that it gets here.
    pub fn create_inode(&mut self, parent: InodeNo, name: &ByName) -> InodeNo {
        let ino = self.allocate_inode();
        let file = InodeEntry {
            references: 1,
            ..InodeEntry::default()
        };
        self.files.insert(ino, file);
        self.recreate_inode(ino);
        self.add_name(parent, name, ino);
        ino
    }

    /// The present session makes a file again that an earlier one should have made. Gives what the
    /// session called it if it was there and was taken away, and how many references that has.
    pub fn recreate_inode(&mut self, ino: InodeNo) -> Option<(InodeNo, u64)> {
        let before = self.bind_to_session(ino, ino);
        if let Some(place) = self
            .files
            .get_mut(&ino)
            .and_then(|file| file.session_inode.as_mut())
        {
            place.references = 1;
        }
        before
    }

    /// A file was opened; the session will know the handle by the second number.
    pub fn open_numbered(&mut self, opening: OpenParameters) -> (HandleId, HandleId) {
        let given = HandleId(AGENT_NUMBER_FIRST + self.last_handle + 1);
        (self.add_handle(opening, given), given)
    }

    /// A file was opened, of which the session learns when it must.
    pub fn open_deferred(&mut self, opening: OpenParameters) -> HandleId {
        let handle = self.add_handle(opening, HandleId(0));
        if let Some(open) = self.handles.get_mut(&handle) {
            open.session_handle.0 = NEVER_OPENED;
        }
        handle
    }

    /// A handle of a file that the present session does not have: it was never told of it, or a
    /// restart made it forget.
    pub fn missing_handle(&self, ino: InodeNo) -> Option<HandleId> {
        let mut handles = self.handles.iter();
        let found =
            handles.find(|(_, open)| open.ino == ino && open.session_handle.0 != self.epoch);
        found.map(|(handle, _)| *handle)
    }

    /// Whether so few files are open that the server surely opens one more.
    pub fn has_early_handle(&self) -> bool {
        self.handles.len() < self.early_handles_max as usize
    }

    /// Whether no session was ever told of a handle.
    pub fn is_deferred(&self, handle: HandleId) -> bool {
        let open = self.handles.get(&handle);
        open.is_some_and(|open| open.session_handle.0 == NEVER_OPENED)
    }

    /// The number by which a session is to open a handle that none was told of: it keeps a
    /// descriptor for it.
    pub fn deferred_number(&self, handle: HandleId) -> Option<HandleId> {
        let promised = HandleId(AGENT_NUMBER_FIRST + handle.0);
        self.is_deferred(handle).then_some(promised)
    }

    /// Whether an operation reads by such a handle a file that the present session has.
    pub fn is_deferred_read(&self, op: &FileOp) -> bool {
        let FileOp::Read { handle, .. } = op else {
            return false;
        };
        let open = self.handles.get(handle);
        open.is_some_and(|open| self.is_deferred(*handle) && self.is_present(open.ino))
    }

    /// Whether operations name a handle to the present session by the number of
    /// [`Self::open_numbered`], so that the session must open it so.
    pub fn is_numbered_open(&self, given: HandleId) -> bool {
        let handle = HandleId(given.0.saturating_sub(AGENT_NUMBER_FIRST));
        let open = self.handles.get(&handle);
        open.is_some_and(|open| open.session_handle == (self.epoch, given))
    }

    /// The present session opens a handle of [`Self::open_numbered`] by the same number.
    pub fn reopen_numbered(&mut self, given: HandleId) {
        self.reopen(HandleId(given.0.saturating_sub(AGENT_NUMBER_FIRST)), given);
    }

    /// Whether the kernel knows a file.
    pub fn has_inode(&self, ino: InodeNo) -> bool {
        self.files.contains_key(&ino)
    }

    /// The server told when a file was made.
    pub fn set_birth(&mut self, ino: InodeNo, born_ns: u64) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.born_ns = born_ns;
        }
    }

    /// The kernel learned once more, without the session, that a name leads to a file.
    pub fn count_lookup(&mut self, ino: InodeNo) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.references += 1;
        }
    }

    /// How to open a handle again.
    pub fn open_parameters(&self, handle: HandleId) -> Option<OpenParameters> {
        let open = self.handles.get(&handle)?;
        Some(OpenParameters {
            ino: open.ino,
            flags: open.flags,
            is_directory: open.is_directory,
        })
    }

    /// The present session opened a handle again.
    pub fn reopen(&mut self, handle: HandleId, opened: HandleId) {
        if let Some(open) = self.handles.get_mut(&handle) {
            open.session_handle = (self.epoch, opened);
        }
    }

    /// A handle is closed.
    pub fn close(&mut self, handle: HandleId) {
        self.handles.remove(&handle);
    }

    /// Whether a handle belongs to an earlier session.
    pub fn is_stale(&self, handle: HandleId) -> bool {
        let open = self.handles.get(&handle);
        open.is_some_and(|open| open.session_handle.0 != self.epoch)
    }

    fn session_inode(&self, ino: InodeNo) -> Option<SessionInode> {
        let place = self.files.get(&ino)?.session_inode?;
        (place.epoch == self.epoch).then_some(place)
    }
}

/// Where a file system does not tell births, numbers and names must do.
fn is_same_birth(one: u64, other: u64) -> bool {
    one == other || one == 0 || other == 0
}

/// Shows every file number of an operation.
fn visit_inodes(op: &mut FileOp, mut see: impl FnMut(&mut InodeNo)) {
    match op {
        FileOp::Lookup { parent, .. }
        | FileOp::MakeNode { parent, .. }
        | FileOp::MakeDirectory { parent, .. }
        | FileOp::MakeSymlink { parent, .. }
        | FileOp::Unlink { parent, .. }
        | FileOp::RemoveDirectory { parent, .. }
        | FileOp::Create { parent, .. } => see(parent),
        FileOp::MakeLink { ino, parent, .. } => {
            see(ino);
            see(parent);
        }
        FileOp::Rename {
            parent, new_parent, ..
        } => {
            see(parent);
            see(new_parent);
        }
        FileOp::Forget { ino, .. }
        | FileOp::GetAttr { ino, .. }
        | FileOp::SetAttr { ino, .. }
        | FileOp::ReadLink { ino }
        | FileOp::ReadFile { ino, .. }
        | FileOp::ListDirectory { ino, .. }
        | FileOp::Open { ino, .. }
        | FileOp::OpenDirectory { ino }
        | FileOp::FsyncDirectory { ino }
        | FileOp::SetXattr { ino, .. }
        | FileOp::GetXattr { ino, .. }
        | FileOp::ListXattr { ino }
        | FileOp::RemoveXattr { ino, .. } => see(ino),
        FileOp::Read { .. }
        | FileOp::Write { .. }
        | FileOp::Fsync { .. }
        | FileOp::Release { .. }
        | FileOp::ReadDirectory { .. }
        | FileOp::ReleaseDirectory { .. }
        | FileOp::StatFs
        | FileOp::Allocate { .. }
        | FileOp::Seek { .. }
        | FileOp::CopyRange { .. } => {}
    }
}

/// Shows every handle of an operation.
fn visit_handles(op: &mut FileOp, mut see: impl FnMut(&mut HandleId)) {
    match op {
        FileOp::GetAttr { handle, .. } | FileOp::SetAttr { handle, .. } => {
            handle.iter_mut().for_each(see);
        }
        FileOp::Read { handle, .. }
        | FileOp::Write { handle, .. }
        | FileOp::Fsync { handle, .. }
        | FileOp::Release { handle }
        | FileOp::ReadDirectory { handle, .. }
        | FileOp::ReleaseDirectory { handle }
        | FileOp::Allocate { handle, .. }
        | FileOp::Seek { handle, .. } => see(handle),
        FileOp::CopyRange { source, target, .. } => {
            see(source);
            see(target);
        }
        FileOp::Lookup { .. }
        | FileOp::Forget { .. }
        | FileOp::ReadLink { .. }
        | FileOp::ReadFile { .. }
        | FileOp::ListDirectory { .. }
        | FileOp::MakeNode { .. }
        | FileOp::MakeDirectory { .. }
        | FileOp::MakeSymlink { .. }
        | FileOp::MakeLink { .. }
        | FileOp::Unlink { .. }
        | FileOp::RemoveDirectory { .. }
        | FileOp::Rename { .. }
        | FileOp::Open { .. }
        | FileOp::Create { .. }
        | FileOp::OpenDirectory { .. }
        | FileOp::FsyncDirectory { .. }
        | FileOp::StatFs
        | FileOp::SetXattr { .. }
        | FileOp::GetXattr { .. }
        | FileOp::ListXattr { .. }
        | FileOp::RemoveXattr { .. } => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(ino: u64, born_ns: u64) -> Attr {
        Attr {
            ino: InodeNo(ino),
            size: 0,
            blocks: 0,
            atime: Default::default(),
            mtime: Default::default(),
            ctime: Default::default(),
            mode: 0o100_644,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            block_size: 4096,
            btime_ns: born_ns,
        }
    }

    fn name(text: &str) -> ByName {
        text.as_bytes().to_vec()
    }

    fn new_map() -> InodeMap {
        InodeMap::new(Epoch(1))
    }

    #[test]
    fn early_opens_are_bounded_by_kept_descriptors() {
        let mut known = new_map();
        known.set_early_handles_max(2);
        let opening = OpenParameters {
            ino: InodeNo::ROOT,
            flags: 0,
            is_directory: false,
        };
        let (first, _) = known.open_numbered(opening);
        assert!(known.has_early_handle());
        known.open_deferred(opening);
        assert!(!known.has_early_handle());
        known.close(first);
        assert!(known.has_early_handle());
        known.set_early_handles_max(0);
        assert!(!known.has_early_handle());
    }

    #[test]
    fn renamed_files_are_found_by_their_current_name() {
        let mut known = new_map();
        let directory = known.record_lookup(InodeNo::ROOT, &name("d"), &attr(10, 1));
        let file = known.record_lookup(directory, &name("a"), &attr(11, 2));
        known.rename((directory, &name("a")), (InodeNo::ROOT, &name("b")), false);
        let op = FileOp::GetAttr {
            ino: file,
            handle: None,
        };
        assert_eq!(known.translate(&op), Ok(op.clone()));
        known.begin_session(Epoch(2));
        assert_eq!(known.translate(&op), Err(MissingObject::File(file)));
        assert_eq!(
            known.route(file),
            InodeRoute::ByName(InodeNo::ROOT, name("b"))
        );
        assert_eq!(
            known.route(InodeNo::ROOT),
            InodeRoute::Present(InodeNo::ROOT)
        );
        assert!(known.rebind_found(file, &attr(11, 2)));
        assert_eq!(known.translate(&op), Ok(op));
        // The kernel drops its one reference, the session its own one.
        assert_eq!(known.forget(file, 1), Some((InodeNo(11), 1)));
        assert_eq!(known.inode_by_name(InodeNo::ROOT, &name("b")), None);
    }

    #[test]
    fn a_reused_inode_number_is_refused() {
        let mut known = new_map();
        let file = known.record_lookup(InodeNo::ROOT, &name("a"), &attr(11, 2));
        known.begin_session(Epoch(2));
        assert!(!known.rebind_found(file, &attr(11, 3)), "born later");
        assert!(!known.rebind_found(file, &attr(12, 2)), "another number");
        assert!(known.rebind_found(file, &attr(11, 2)));
    }

    #[test]
    fn a_new_file_never_replaces_a_removed_one() {
        let mut known = new_map();
        let gone = known.record_lookup(InodeNo::ROOT, &name("a"), &attr(11, 2));
        known.remove_name(InodeNo::ROOT, &name("a"));
        known.begin_session(Epoch(2));
        assert_eq!(known.route(gone), InodeRoute::Unreachable);
        let fresh = known.record_lookup(InodeNo::ROOT, &name("b"), &attr(11, 2));
        assert_ne!(fresh, gone);
        let op = FileOp::ReadLink { ino: fresh };
        let asked = known.translate(&op).expect("it is there");
        assert_eq!(asked, FileOp::ReadLink { ino: InodeNo(11) });
        assert_eq!(known.forget(gone, 1), None);
        assert_eq!(known.forget(fresh, 1), Some((InodeNo(11), 1)));
    }

    #[test]
    fn client_numbered_files_keep_their_identity_across_sessions() {
        let mut known = new_map();
        let file = known.create_inode(InodeNo::ROOT, &name("a"));
        known.set_birth(file, 5);
        assert_eq!(known.route(file), InodeRoute::Present(file));
        known.begin_session(Epoch(2));
        assert_eq!(
            known.record_lookup(InodeNo::ROOT, &name("a"), &attr(11, 5)),
            file
        );
        assert_eq!(known.route(file), InodeRoute::Present(InodeNo(11)));
        known.begin_session(Epoch(3));
        let other = known.record_lookup(InodeNo::ROOT, &name("a"), &attr(11, 6));
        assert_ne!(other, file, "born later");
    }

    #[test]
    fn a_recreated_file_has_only_its_new_number() {
        let mut known = new_map();
        let file = known.create_inode(InodeNo::ROOT, &name("a"));
        known.begin_session(Epoch(2));
        // It is there half-made, is found, and is taken away.
        assert!(known.rebind_found(file, &attr(11, 0)));
        assert_eq!(known.route(file), InodeRoute::Present(InodeNo(11)));
        assert_eq!(known.recreate_inode(file), Some((InodeNo(11), 1)));
        assert_eq!(known.route(file), InodeRoute::Present(file));
        // The host may give the old number to another file now.
        assert_eq!(known.inode_by_server(InodeNo(11)), None);
        let other = known.record_lookup(InodeNo::ROOT, &name("b"), &attr(11, 0));
        assert_eq!(known.route(other), InodeRoute::Present(InodeNo(11)));
        assert_ne!(other, file);
        assert_eq!(known.recreate_inode(file), None);
        assert_eq!(known.forget(file, 1), Some((file, 1)));
    }

    #[test]
    fn stale_handles_count_as_unseen_after_restarts() {
        let mut known = new_map();
        let ino = known.record_lookup(InodeNo::ROOT, &name("a"), &attr(11, 1));
        let opening = OpenParameters {
            ino,
            flags: 0,
            is_directory: false,
        };
        let (told, given) = known.open_numbered(opening);
        assert_eq!(known.missing_handle(ino), None);
        assert!(known.is_numbered_open(given));
        known.begin_session(Epoch(2));
        assert!(!known.is_numbered_open(given));
        assert_eq!(known.missing_handle(ino), Some(told));
        assert!(!known.is_deferred(told));
        known.reopen(told, HandleId(5));
        assert!(
            !known.is_numbered_open(given),
            "it is open by another number"
        );
        let untold = known.open_deferred(opening);
        assert_eq!(known.missing_handle(ino), Some(untold));
        assert!(known.is_deferred(untold));
    }

    #[test]
    fn exchanged_names_swap_and_replaced_names_vanish() {
        let mut known = new_map();
        let (a, b) = (name("a"), name("b"));
        let one = known.record_lookup(InodeNo::ROOT, &a, &attr(11, 1));
        let two = known.record_lookup(InodeNo::ROOT, &b, &attr(12, 1));
        known.rename((InodeNo::ROOT, &a), (InodeNo::ROOT, &b), true);
        assert_eq!(known.inode_by_name(InodeNo::ROOT, &a), Some(two));
        assert_eq!(known.inode_by_name(InodeNo::ROOT, &b), Some(one));
        known.rename((InodeNo::ROOT, &a), (InodeNo::ROOT, &b), false);
        assert_eq!(known.inode_by_name(InodeNo::ROOT, &b), Some(two));
        known.begin_session(Epoch(2));
        assert_eq!(known.route(one), InodeRoute::Unreachable);
    }

    #[test]
    fn handles_outlive_sessions() {
        let mut known = new_map();
        let ino = known.record_lookup(InodeNo::ROOT, &name("a"), &attr(11, 1));
        let opening = OpenParameters {
            ino,
            flags: 2,
            is_directory: false,
        };
        let handle = known.add_handle(opening, HandleId(77));
        let op = |handle| FileOp::Release { handle };
        assert_eq!(known.translate(&op(handle)), Ok(op(HandleId(77))));
        known.begin_session(Epoch(2));
        assert!(known.is_stale(handle));
        assert_eq!(
            known.translate(&op(handle)),
            Err(MissingObject::Handle(handle))
        );
        assert_eq!(known.open_parameters(handle), Some(opening));
        known.reopen(handle, HandleId(1));
        assert_eq!(known.translate(&op(handle)), Ok(op(HandleId(1))));
        known.close(handle);
        assert_eq!(known.open_parameters(handle), None);
    }

    #[test]
    fn remaining_names_still_resolve_after_many_links() {
        let mut known = new_map();
        let mut file = InodeNo(0);
        for number in 0..20 {
            file = known.record_lookup(InodeNo::ROOT, &name(&number.to_string()), &attr(11, 1));
        }
        known.remove_name(InodeNo::ROOT, &name("19"));
        known.begin_session(Epoch(2));
        assert!(matches!(
            known.route(file),
            InodeRoute::ByName(InodeNo::ROOT, _)
        ));
        assert_eq!(known.forget(file, 20), None);
        assert!(known.inodes_by_name.is_empty());
    }
}
