//! What the kernel knows of a tree behind a server: files by number, their names, open handles.
//! It is what a session is made again from after a restart of the server. Asks nobody.

use std::collections::BTreeMap;

use bafs_proto::file_op::{Attr, FileOp, Name};
use bafs_proto::ids::{Epoch, HandleId, InodeNo};
use bafs_proto::limits::{EARLY_HANDLES_MAX, GIVEN_FIRST};

/// No session has this number.
const NEVER: Epoch = Epoch(0);

/// Names remembered for one file: enough for the usual hard links.
const NAMES_MAX: usize = 8;

/// Files and handles, by the numbers that the kernel has for them.
#[derive(Debug)]
pub struct Known {
    epoch: Epoch,
    files: BTreeMap<InodeNo, File>,
    by_name: BTreeMap<(InodeNo, Name), InodeNo>,
    /// The files that the present session knows, by its numbers.
    by_server: BTreeMap<InodeNo, InodeNo>,
    handles: BTreeMap<HandleId, Handle>,
    last_handle: u64,
    /// While so many are open, whoever opened them, more are opened by the server.
    early_handles: u32,
    spares: u64,
}

#[derive(Debug, Default)]
struct File {
    /// As the kernel counts.
    references: u64,
    names: Vec<(InodeNo, Name)>,
    born_ns: u64,
    place: Option<Place>,
}

/// Where a session has a file.
#[derive(Debug, Clone, Copy)]
struct Place {
    epoch: Epoch,
    ino: InodeNo,
    /// As the session counts.
    references: u64,
}

#[derive(Debug, Clone, Copy)]
struct Handle {
    ino: InodeNo,
    flags: i32,
    is_directory: bool,
    place: (Epoch, HandleId),
}

/// Something that the present session does not have yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// A file, which must be looked up again.
    File(InodeNo),
    /// An open file or directory, which must be opened again.
    Handle(HandleId),
}

/// How to find a file again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// The present session has it under this number.
    Here(InodeNo),
    /// Look this name up in this directory, whose own way comes first.
    Name(InodeNo, Name),
    /// No name leads to it any more.
    Gone,
}

/// What opens a handle again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opening {
    /// The file.
    pub ino: InodeNo,
    /// How it was opened.
    pub flags: i32,
    /// Whether it is a directory.
    pub is_directory: bool,
}

impl Known {
    /// What is known at the start of a session: the root.
    pub fn new(epoch: Epoch) -> Self {
        let mut known = Self {
            epoch,
            files: BTreeMap::new(),
            by_name: BTreeMap::new(),
            by_server: BTreeMap::new(),
            handles: BTreeMap::new(),
            last_handle: 0,
            early_handles: EARLY_HANDLES_MAX,
            spares: 0,
        };
        known.files.insert(InodeNo::ROOT, File::default());
        known.begin(epoch);
        known
    }

    /// A new session begins: it has the root and nothing else.
    pub fn begin(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.by_server.clear();
        self.settle(InodeNo::ROOT, InodeNo::ROOT);
    }

    /// The present session keeps descriptors for so many files that are opened before it does.
    pub fn allow_early(&mut self, handles: u32) {
        self.early_handles = handles;
    }

    /// The session that the numbers belong to.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The operation with the present session's numbers.
    ///
    /// # Errors
    /// What the session must be given first.
    pub fn translate(&self, op: &FileOp) -> Result<FileOp, Missing> {
        let mut op = op.clone();
        let mut missing = None;
        inodes_of(&mut op, |ino| match self.place(*ino) {
            None => missing = Some(Missing::File(*ino)),
            Some(place) => *ino = place.ino,
        });
        handles_of(&mut op, |handle| match self.handles.get(handle) {
            Some(open) if open.place.0 == self.epoch => *handle = open.place.1,
            _ => missing = Some(Missing::Handle(*handle)),
        });
        missing.map_or(Ok(op), Err)
    }

    /// Whether the present session has a file.
    pub fn is_here(&self, ino: InodeNo) -> bool {
        self.place(ino).is_some()
    }

    /// Whether a program has a file open, or believes so.
    pub fn is_open(&self, ino: InodeNo) -> bool {
        self.handles.values().any(|handle| handle.ino == ino)
    }

    /// How to find a file.
    pub fn way(&self, ino: InodeNo) -> Way {
        if let Some(place) = self.place(ino) {
            return Way::Here(place.ino);
        }
        let names = self.files.get(&ino).map_or(&[][..], |file| &file.names);
        let leads = |name: &&(InodeNo, Name)| self.files.contains_key(&name.0);
        match names.iter().find(leads) {
            Some((parent, name)) => Way::Name(*parent, name.clone()),
            None => Way::Gone,
        }
    }

    /// The file that a name was last seen to lead to.
    pub fn named(&self, parent: InodeNo, name: &Name) -> Option<InodeNo> {
        self.by_name.get(&(parent, name.clone())).copied()
    }

    /// The file that the present session has under a number.
    pub fn of_server(&self, ino: InodeNo) -> Option<InodeNo> {
        self.by_server.get(&ino).copied()
    }

    /// Takes note that a name led to a file once more, for nobody but us. Whether it is the file
    /// that the kernel knows by `ino`.
    pub fn find_again(&mut self, ino: InodeNo, attr: &Attr) -> bool {
        let other = self
            .by_server
            .get(&attr.ino)
            .is_some_and(|known| *known != ino);
        let Some(file) = self.files.get(&ino) else {
            return false;
        };
        // A spare number was given by one session and means nothing to the next.
        let renumbered = ino.0 < GIVEN_FIRST && attr.ino.0 < GIVEN_FIRST && ino != attr.ino;
        if other || renumbered || !same_birth(file.born_ns, attr.born_ns) {
            return false;
        }
        self.settle(ino, attr.ino);
        self.refer(ino);
        true
    }

    /// The kernel learns that a name leads to what the session calls `attr.ino`; the answer is
    /// the kernel's number.
    pub fn admit(&mut self, parent: InodeNo, name: &Name, attr: &Attr) -> InodeNo {
        let ino = match self.by_server.get(&attr.ino) {
            Some(ino) => *ino,
            None => match self.renumbered(parent, name, attr) {
                Some(ino) => {
                    self.settle(ino, attr.ino);
                    ino
                }
                None => self.meet(attr),
            },
        };
        self.refer(ino);
        if let Some(file) = self.files.get_mut(&ino) {
            file.references += 1;
        }
        self.name(parent, name, ino);
        ino
    }

    /// A file that has a number of ours or of an earlier session's, and that the present one has
    /// under another number: its name and its birth tell.
    fn renumbered(&self, parent: InodeNo, name: &Name, attr: &Attr) -> Option<InodeNo> {
        let ino = self.named(parent, name)?;
        let file = self.files.get(&ino)?;
        let is_of_before = file.place.is_none_or(|place| place.epoch != self.epoch);
        let is_same = ino.0 >= GIVEN_FIRST && same_birth(file.born_ns, attr.born_ns);
        (is_of_before && is_same).then_some(ino)
    }

    /// A file that the present session has shown for the first time.
    fn meet(&mut self, attr: &Attr) -> InodeNo {
        let mut ino = attr.ino;
        if let Some(file) = self.files.get(&ino) {
            // Known from an earlier session, if it can still be there.
            let same = !file.names.is_empty() && same_birth(file.born_ns, attr.born_ns);
            if !same || file.place.is_some_and(|place| place.epoch == self.epoch) {
                ino = self.spare();
            }
        }
        let file = self.files.entry(ino).or_default();
        file.born_ns = attr.born_ns;
        self.settle(ino, attr.ino);
        ino
    }

    fn spare(&mut self) -> InodeNo {
        loop {
            let ino = InodeNo(GIVEN_FIRST + self.spares);
            self.spares += 1;
            if !self.files.contains_key(&ino) {
                return ino;
            }
        }
    }

    /// The present session has a file under a number; what it had for it before is no more.
    /// Gives that number, and how many references the session counts there.
    fn settle(&mut self, ino: InodeNo, server: InodeNo) -> Option<(InodeNo, u64)> {
        let epoch = self.epoch;
        let file = self.files.get_mut(&ino)?;
        let before = file.place.filter(|place| place.epoch == epoch);
        if before.is_none_or(|place| place.ino != server) {
            file.place = Some(Place {
                epoch,
                ino: server,
                references: 0,
            });
        }
        self.by_server.insert(server, ino);
        let Place {
            ino: number,
            references,
            ..
        } = before.filter(|place| place.ino != server)?;
        if self.by_server.get(&number) == Some(&ino) {
            self.by_server.remove(&number);
        }
        Some((number, references))
    }

    fn refer(&mut self, ino: InodeNo) {
        if let Some(place) = self
            .files
            .get_mut(&ino)
            .and_then(|file| file.place.as_mut())
        {
            place.references += 1;
        }
    }

    fn name(&mut self, parent: InodeNo, name: &Name, ino: InodeNo) {
        let key = (parent, name.clone());
        match self.by_name.insert(key.clone(), ino) {
            Some(before) if before == ino => return,
            Some(before) => self.lose_name(before, &key),
            None => {}
        }
        if let Some(file) = self.files.get_mut(&ino) {
            file.names.push(key);
            if file.names.len() > NAMES_MAX {
                let oldest = file.names.remove(0);
                self.by_name.remove(&oldest);
            }
        }
    }

    fn lose_name(&mut self, ino: InodeNo, key: &(InodeNo, Name)) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.names.retain(|name| name != key);
        }
    }

    /// A name was removed.
    pub fn unname(&mut self, parent: InodeNo, name: &Name) {
        let key = (parent, name.clone());
        if let Some(ino) = self.by_name.remove(&key) {
            self.lose_name(ino, &key);
        }
    }

    /// A name became another one, which it replaced or changed places with.
    pub fn rename(
        &mut self,
        (parent, name): (InodeNo, &Name),
        (new_parent, new_name): (InodeNo, &Name),
        exchanges: bool,
    ) {
        let (moved, other) = (self.named(parent, name), self.named(new_parent, new_name));
        self.unname(parent, name);
        self.unname(new_parent, new_name);
        if let Some(ino) = moved {
            self.name(new_parent, new_name, ino);
        }
        if let Some(ino) = other.filter(|_| exchanges) {
            self.name(parent, name, ino);
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
            if self.by_name.get(key) == Some(&ino) {
                self.by_name.remove(key);
            }
        }
        let place = file.place.filter(|place| place.epoch == self.epoch)?;
        self.by_server.remove(&place.ino);
        Some((place.ino, place.references))
    }

    /// A file was opened; the answer is the kernel's handle.
    pub fn open(&mut self, opening: Opening, handle: HandleId) -> HandleId {
        self.last_handle += 1;
        let Opening {
            ino,
            flags,
            is_directory,
        } = opening;
        let open = Handle {
            ino,
            flags,
            is_directory,
            place: (self.epoch, handle),
        };
        self.handles.insert(HandleId(self.last_handle), open);
        HandleId(self.last_handle)
    }

    /// A file was made that the session will know by the number that it gets here.
    pub fn make(&mut self, parent: InodeNo, name: &Name) -> InodeNo {
        let ino = self.spare();
        let file = File {
            references: 1,
            ..File::default()
        };
        self.files.insert(ino, file);
        self.make_again(ino);
        self.name(parent, name, ino);
        ino
    }

    /// The present session makes a file again that an earlier one should have made. Gives what the
    /// session called it if it was there and was taken away, and how many references that has.
    pub fn make_again(&mut self, ino: InodeNo) -> Option<(InodeNo, u64)> {
        let before = self.settle(ino, ino);
        if let Some(place) = self
            .files
            .get_mut(&ino)
            .and_then(|file| file.place.as_mut())
        {
            place.references = 1;
        }
        before
    }

    /// A file was opened; the session will know the handle by the second number.
    pub fn open_given(&mut self, opening: Opening) -> (HandleId, HandleId) {
        let given = HandleId(GIVEN_FIRST + self.last_handle + 1);
        (self.open(opening, given), given)
    }

    /// A file was opened, of which the session learns when it must.
    pub fn open_unseen(&mut self, opening: Opening) -> HandleId {
        let handle = self.open(opening, HandleId(0));
        if let Some(open) = self.handles.get_mut(&handle) {
            open.place.0 = NEVER;
        }
        handle
    }

    /// A handle of a file that the present session does not have: it was never told of it, or a
    /// restart made it forget.
    pub fn unseen(&self, ino: InodeNo) -> Option<HandleId> {
        let mut handles = self.handles.iter();
        let found = handles.find(|(_, open)| open.ino == ino && open.place.0 != self.epoch);
        found.map(|(handle, _)| *handle)
    }

    /// Whether so few files are open that the server surely opens one more.
    pub fn opens_surely(&self) -> bool {
        self.handles.len() < self.early_handles as usize
    }

    /// Whether no session was ever told of a handle.
    pub fn is_untold(&self, handle: HandleId) -> bool {
        let open = self.handles.get(&handle);
        open.is_some_and(|open| open.place.0 == NEVER)
    }

    /// The number by which a session is to open a handle that none was told of: it keeps a
    /// descriptor for it.
    pub fn promised(&self, handle: HandleId) -> Option<HandleId> {
        let promised = HandleId(GIVEN_FIRST + handle.0);
        self.is_untold(handle).then_some(promised)
    }

    /// Whether operations name a handle to the present session by the number of
    /// [`Self::open_given`], so that the session must open it so.
    pub fn is_awaited(&self, given: HandleId) -> bool {
        let handle = HandleId(given.0.saturating_sub(GIVEN_FIRST));
        let open = self.handles.get(&handle);
        open.is_some_and(|open| open.place == (self.epoch, given))
    }

    /// The present session opens a handle of [`Self::open_given`] by the same number.
    pub fn open_given_again(&mut self, given: HandleId) {
        self.open_again(HandleId(given.0.saturating_sub(GIVEN_FIRST)), given);
    }

    /// Whether the kernel knows a file.
    pub fn has(&self, ino: InodeNo) -> bool {
        self.files.contains_key(&ino)
    }

    /// The server told when a file was made.
    pub fn born(&mut self, ino: InodeNo, born_ns: u64) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.born_ns = born_ns;
        }
    }

    /// The kernel learned once more, without the session, that a name leads to a file.
    pub fn meet_again(&mut self, ino: InodeNo) {
        if let Some(file) = self.files.get_mut(&ino) {
            file.references += 1;
        }
    }

    /// How to open a handle again.
    pub fn opening(&self, handle: HandleId) -> Option<Opening> {
        let open = self.handles.get(&handle)?;
        Some(Opening {
            ino: open.ino,
            flags: open.flags,
            is_directory: open.is_directory,
        })
    }

    /// The present session opened a handle again.
    pub fn open_again(&mut self, handle: HandleId, opened: HandleId) {
        if let Some(open) = self.handles.get_mut(&handle) {
            open.place = (self.epoch, opened);
        }
    }

    /// A handle is closed.
    pub fn close(&mut self, handle: HandleId) {
        self.handles.remove(&handle);
    }

    /// Whether a handle belongs to an earlier session.
    pub fn is_stale(&self, handle: HandleId) -> bool {
        let open = self.handles.get(&handle);
        open.is_some_and(|open| open.place.0 != self.epoch)
    }

    fn place(&self, ino: InodeNo) -> Option<Place> {
        let place = self.files.get(&ino)?.place?;
        (place.epoch == self.epoch).then_some(place)
    }
}

/// Where a file system does not tell births, numbers and names must do.
fn same_birth(one: u64, other: u64) -> bool {
    one == other || one == 0 || other == 0
}

/// Shows every file number of an operation.
fn inodes_of(op: &mut FileOp, mut see: impl FnMut(&mut InodeNo)) {
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
fn handles_of(op: &mut FileOp, mut see: impl FnMut(&mut HandleId)) {
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
            born_ns,
        }
    }

    fn name(text: &str) -> Name {
        text.as_bytes().to_vec()
    }

    fn known() -> Known {
        Known::new(Epoch(1))
    }

    #[test]
    fn as_many_files_are_opened_early_as_the_session_keeps_descriptors_for() {
        let mut known = known();
        known.allow_early(2);
        let opening = Opening {
            ino: InodeNo::ROOT,
            flags: 0,
            is_directory: false,
        };
        let (first, _) = known.open_given(opening);
        assert!(known.opens_surely());
        known.open_unseen(opening);
        assert!(!known.opens_surely());
        known.close(first);
        assert!(known.opens_surely());
        known.allow_early(0);
        assert!(!known.opens_surely());
    }

    #[test]
    fn a_file_is_found_again_by_the_name_that_it_has_now() {
        let mut known = known();
        let directory = known.admit(InodeNo::ROOT, &name("d"), &attr(10, 1));
        let file = known.admit(directory, &name("a"), &attr(11, 2));
        known.rename((directory, &name("a")), (InodeNo::ROOT, &name("b")), false);
        let op = FileOp::GetAttr {
            ino: file,
            handle: None,
        };
        assert_eq!(known.translate(&op), Ok(op.clone()));
        known.begin(Epoch(2));
        assert_eq!(known.translate(&op), Err(Missing::File(file)));
        assert_eq!(known.way(file), Way::Name(InodeNo::ROOT, name("b")));
        assert_eq!(known.way(InodeNo::ROOT), Way::Here(InodeNo::ROOT));
        assert!(known.find_again(file, &attr(11, 2)));
        assert_eq!(known.translate(&op), Ok(op));
        // The kernel drops its one reference, the session its own one.
        assert_eq!(known.forget(file, 1), Some((InodeNo(11), 1)));
        assert_eq!(known.named(InodeNo::ROOT, &name("b")), None);
    }

    #[test]
    fn another_file_of_the_same_number_is_refused() {
        let mut known = known();
        let file = known.admit(InodeNo::ROOT, &name("a"), &attr(11, 2));
        known.begin(Epoch(2));
        assert!(!known.find_again(file, &attr(11, 3)), "born later");
        assert!(!known.find_again(file, &attr(12, 2)), "another number");
        assert!(known.find_again(file, &attr(11, 2)));
    }

    #[test]
    fn a_new_file_does_not_take_the_place_of_a_removed_one() {
        let mut known = known();
        let gone = known.admit(InodeNo::ROOT, &name("a"), &attr(11, 2));
        known.unname(InodeNo::ROOT, &name("a"));
        known.begin(Epoch(2));
        assert_eq!(known.way(gone), Way::Gone);
        let fresh = known.admit(InodeNo::ROOT, &name("b"), &attr(11, 2));
        assert_ne!(fresh, gone);
        let op = FileOp::ReadLink { ino: fresh };
        let asked = known.translate(&op).expect("it is there");
        assert_eq!(asked, FileOp::ReadLink { ino: InodeNo(11) });
        assert_eq!(known.forget(gone, 1), None);
        assert_eq!(known.forget(fresh, 1), Some((InodeNo(11), 1)));
    }

    #[test]
    fn a_file_that_we_numbered_is_the_same_under_the_number_of_a_new_session() {
        let mut known = known();
        let file = known.make(InodeNo::ROOT, &name("a"));
        known.born(file, 5);
        assert_eq!(known.way(file), Way::Here(file));
        known.begin(Epoch(2));
        assert_eq!(known.admit(InodeNo::ROOT, &name("a"), &attr(11, 5)), file);
        assert_eq!(known.way(file), Way::Here(InodeNo(11)));
        known.begin(Epoch(3));
        let other = known.admit(InodeNo::ROOT, &name("a"), &attr(11, 6));
        assert_ne!(other, file, "born later");
    }

    #[test]
    fn a_file_that_is_made_again_is_known_by_its_new_number_only() {
        let mut known = known();
        let file = known.make(InodeNo::ROOT, &name("a"));
        known.begin(Epoch(2));
        // It is there half-made, is found, and is taken away.
        assert!(known.find_again(file, &attr(11, 0)));
        assert_eq!(known.way(file), Way::Here(InodeNo(11)));
        assert_eq!(known.make_again(file), Some((InodeNo(11), 1)));
        assert_eq!(known.way(file), Way::Here(file));
        // The host may give the old number to another file now.
        assert_eq!(known.of_server(InodeNo(11)), None);
        let other = known.admit(InodeNo::ROOT, &name("b"), &attr(11, 0));
        assert_eq!(known.way(other), Way::Here(InodeNo(11)));
        assert_ne!(other, file);
        assert_eq!(known.make_again(file), None);
        assert_eq!(known.forget(file, 1), Some((file, 1)));
    }

    #[test]
    fn handles_that_a_restart_made_forget_are_as_unseen_as_untold_ones() {
        let mut known = known();
        let ino = known.admit(InodeNo::ROOT, &name("a"), &attr(11, 1));
        let opening = Opening {
            ino,
            flags: 0,
            is_directory: false,
        };
        let (told, given) = known.open_given(opening);
        assert_eq!(known.unseen(ino), None);
        assert!(known.is_awaited(given));
        known.begin(Epoch(2));
        assert!(!known.is_awaited(given));
        assert_eq!(known.unseen(ino), Some(told));
        assert!(!known.is_untold(told));
        known.open_again(told, HandleId(5));
        assert!(!known.is_awaited(given), "it is open by another number");
        let untold = known.open_unseen(opening);
        assert_eq!(known.unseen(ino), Some(untold));
        assert!(known.is_untold(untold));
    }

    #[test]
    fn exchanged_names_change_places_and_replaced_ones_go() {
        let mut known = known();
        let (a, b) = (name("a"), name("b"));
        let one = known.admit(InodeNo::ROOT, &a, &attr(11, 1));
        let two = known.admit(InodeNo::ROOT, &b, &attr(12, 1));
        known.rename((InodeNo::ROOT, &a), (InodeNo::ROOT, &b), true);
        assert_eq!(known.named(InodeNo::ROOT, &a), Some(two));
        assert_eq!(known.named(InodeNo::ROOT, &b), Some(one));
        known.rename((InodeNo::ROOT, &a), (InodeNo::ROOT, &b), false);
        assert_eq!(known.named(InodeNo::ROOT, &b), Some(two));
        known.begin(Epoch(2));
        assert_eq!(known.way(one), Way::Gone);
    }

    #[test]
    fn handles_outlive_sessions() {
        let mut known = known();
        let ino = known.admit(InodeNo::ROOT, &name("a"), &attr(11, 1));
        let opening = Opening {
            ino,
            flags: 2,
            is_directory: false,
        };
        let handle = known.open(opening, HandleId(77));
        let op = |handle| FileOp::Release { handle };
        assert_eq!(known.translate(&op(handle)), Ok(op(HandleId(77))));
        known.begin(Epoch(2));
        assert!(known.is_stale(handle));
        assert_eq!(known.translate(&op(handle)), Err(Missing::Handle(handle)));
        assert_eq!(known.opening(handle), Some(opening));
        known.open_again(handle, HandleId(1));
        assert_eq!(known.translate(&op(handle)), Ok(op(HandleId(1))));
        known.close(handle);
        assert_eq!(known.opening(handle), None);
    }

    #[test]
    fn names_that_are_left_after_many_links_still_lead_there() {
        let mut known = known();
        let mut file = InodeNo(0);
        for number in 0..20 {
            file = known.admit(InodeNo::ROOT, &name(&number.to_string()), &attr(11, 1));
        }
        known.unname(InodeNo::ROOT, &name("19"));
        known.begin(Epoch(2));
        assert!(matches!(known.way(file), Way::Name(InodeNo::ROOT, _)));
        assert_eq!(known.forget(file, 20), None);
        assert!(known.by_name.is_empty());
    }
}
