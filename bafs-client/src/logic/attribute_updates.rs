//! What the writer of a volume learns from answers that it did not give itself, and what it must
//! not count on while the server is asked.

use bafs_proto::file_op::{Attr, ByName, Caller, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::{HandleId, InodeNo};
use nix::libc;

use super::delegation::{CAPABILITY_XATTR, Delegation};
use super::inflight_queries::InflightQuery;
use super::inode_map::InodeMap;
use super::operation_log::marker_name;

impl Delegation {
    /// It is asked: until it answers nobody counts on what that changes.
    pub fn begin_query(&mut self, inodes: &InodeMap, op: &FileOp) -> InflightQuery {
        let changing = self.invalidate(inodes, op);
        // Of a file with very many names not all are known here: it may be any of these.
        let may_be_there = |parent, name| self.metadata.has_name(parent, name) != Some(false);
        let some_linked = removed_name(op).is_some_and(|(parent, name)| {
            inodes.inode_by_name(parent, name).is_none() && may_be_there(parent, name)
        });
        if some_linked {
            self.metadata.invalidate_linked();
            self.small_files.discard_all();
        }
        let question = self.queries.begin_query(changing, some_linked);
        match op {
            FileOp::Lookup { parent, name } if inodes.inode_by_name(*parent, name).is_none() => {
                let (end, settled) = (self.log.end_position(), self.log.acknowledged_position());
                question.with_awaited_position((end > settled).then_some(end))
            }
            FileOp::ReadDirectory { .. } | FileOp::ListDirectory { .. } => {
                let (end, settled) = (self.log.end_position(), self.log.acknowledged_position());
                question.with_awaited_position((end > settled).then_some(end))
            }
            _ => question,
        }
    }

    /// The server has answered it, for which space was [reserved](Self::reserve_space). Whether
    /// attributes in the answer are still those of their file: false when something else changed
    /// it meanwhile, or when they may lack what was done before. Times that
    /// programs were told already stay as they are.
    pub fn end_query(
        &mut self,
        inodes: &InodeMap,
        (caller, op, question): (Caller, &FileOp, InflightQuery),
        result: &mut FileResult,
    ) -> bool {
        match result {
            Ok(FileReply::Attr(attr) | FileReply::Opened { attr, .. }) => {
                self.metadata.apply_pending_times(attr);
            }
            Ok(FileReply::Entries(entries)) => {
                let attrs = entries.iter_mut().filter_map(|entry| entry.attr.as_mut());
                attrs.for_each(|attr| self.metadata.apply_pending_times(attr));
            }
            _ => {}
        }
        self.end_reservation(op);
        let changed = self.invalidate(inodes, op);
        if question.can_change_any() {
            self.metadata.invalidate_linked();
        }
        let lacks = self.is_possibly_outdated(&question, result);
        if !lacks {
            let directory = match op {
                FileOp::ListDirectory { ino, .. } => Some(*ino),
                FileOp::ReadDirectory { handle, .. } => {
                    let opening = inodes.open_parameters(*handle);
                    opening.map(|opening| opening.ino)
                }
                _ => None,
            };
            self.learn_result((caller, op, &question), result, directory);
        }
        if let (FileOp::ReadDirectory { handle, cookie, .. }, Ok(FileReply::Entries(entries))) =
            (op, &*result)
        {
            self.learn_page(inodes, &question, (*handle, *cookie), entries);
        }
        let is_true = match result {
            Ok(FileReply::Attr(attr)) => !lacks && self.queries.is_current(&question, attr.ino),
            _ => true,
        };
        self.queries.end_query(question, changed);
        is_true
    }

    /// Whether a name that nobody knew led to a file that programs may have changed by another
    /// one: before the answer it was not known for which file to wait.
    fn is_possibly_outdated(&self, query: &InflightQuery, result: &FileResult) -> bool {
        let (Some(_), Ok(FileReply::Attr(attr))) = (query.awaited_position(), result) else {
            return false;
        };
        self.metadata.approximate_attr(attr.ino).is_some()
            || !self.queries.is_current(query, attr.ino)
    }

    /// Takes in what the server answered to an operation that it was asked itself, about this
    /// directory if it is a listing.
    fn learn_result(
        &mut self,
        (caller, op, question): (Caller, &FileOp, &InflightQuery),
        result: &FileResult,
        directory: Option<InodeNo>,
    ) {
        if let (FileOp::GetXattr { ino, name }, Err(Errno(libc::ENODATA))) = (op, result)
            && name == CAPABILITY_XATTR
            && self.queries.is_current(question, *ino)
        {
            self.metadata.set_no_capabilities(*ino, true);
        }
        let Ok(reply) = result else {
            return;
        };
        self.learn_names(op);
        match (op, reply) {
            (
                FileOp::Lookup { .. }
                | FileOp::GetAttr { .. }
                | FileOp::SetAttr { .. }
                | FileOp::Open { .. },
                FileReply::Attr(attr) | FileReply::Opened { attr, .. },
            ) => self.learn_attr(question, attr),
            (
                FileOp::Create { mode, .. } | FileOp::MakeDirectory { mode, .. },
                FileReply::Attr(attr) | FileReply::Opened { attr, .. },
            ) => {
                let kept = if attr.is_directory() { 0o1777 } else { 0o7777 };
                let is_new = attr.nlink == 1 + u32::from(attr.is_directory());
                let given = (attr.uid, attr.gid) == (caller.uid, caller.gid);
                if attr.mode & 0o7777 == mode & kept && given && is_new {
                    self.owning_callers.insert((caller.uid, caller.gid));
                }
                let is_empty_file = attr.is_regular() && attr.size == 0 && attr.blocks == 0;
                if is_empty_file {
                    self.new_file_attr.get_or_insert(*attr);
                } else if attr.is_directory() {
                    self.new_directory_attr.get_or_insert(*attr);
                }
                self.learn_attr(question, attr);
            }
            (
                FileOp::ReadDirectory { .. } | FileOp::ListDirectory { .. },
                FileReply::Entries(entries),
            ) => {
                let has_unsettled = question.awaited_position().is_some();
                for attr in entries.iter().filter_map(|entry| entry.attr.as_ref()) {
                    // The listing may lack what was written to a known file before.
                    let is_known = self.metadata.approximate_attr(attr.ino).is_some();
                    if !has_unsettled || !is_known {
                        self.learn_attr(question, attr);
                    }
                    match directory {
                        Some(directory) if attr.is_directory() => {
                            self.sibling_directories.note_listed(directory, attr.ino);
                        }
                        Some(directory) => self.small_files.note_listed(directory, attr),
                        None => {}
                    }
                }
            }
            _ => {}
        }
    }

    /// What was asked before the file changed is out of date, whether the server has run that
    /// meanwhile or not.
    fn learn_attr(&mut self, query: &InflightQuery, attr: &Attr) {
        if self.log.last_position_of(attr.ino).is_none() && self.queries.is_current(query, attr.ino)
        {
            self.metadata.store_attr(attr);
        }
    }

    fn learn_names(&mut self, op: &FileOp) {
        match op {
            FileOp::MakeNode { parent, name, .. }
            | FileOp::MakeSymlink { parent, name, .. }
            | FileOp::MakeLink { parent, name, .. } => self.metadata.add_name(*parent, name),
            FileOp::RemoveDirectory { parent, name } => self.metadata.remove_name(*parent, name),
            FileOp::Rename {
                parent,
                name,
                new_parent,
                new_name,
                flags,
            } => {
                if flags & libc::RENAME_EXCHANGE == 0 {
                    self.metadata.remove_name(*parent, name);
                }
                self.metadata.add_name(*new_parent, new_name);
            }
            op => match marker_name(op) {
                Some((parent, name, true)) => self.metadata.add_name(parent, name),
                Some((parent, name, false)) => self.metadata.remove_name(parent, name),
                None => {}
            },
        }
    }

    /// Forgets what the server may change by an operation; gives the files.
    fn invalidate(&mut self, inodes: &InodeMap, op: &FileOp) -> Vec<InodeNo> {
        let mut changed = Vec::new();
        let mut directories = Vec::new();
        let named = |parent: &InodeNo, name: &ByName| inodes.inode_by_name(*parent, name);
        let opened = |handle: &HandleId| inodes.open_parameters(*handle).map(|opening| opening.ino);
        if let FileOp::SetXattr { ino, .. } = op {
            self.metadata.set_no_capabilities(*ino, false);
        }
        match op {
            FileOp::SetAttr { ino, .. }
            | FileOp::SetXattr { ino, .. }
            | FileOp::RemoveXattr { ino, .. } => changed.push(Some(*ino)),
            FileOp::MakeLink { ino, parent, .. } => {
                changed.push(Some(*ino));
                directories.push(*parent);
            }
            FileOp::Create { parent, name, .. }
            | FileOp::MakeNode { parent, name, .. }
            | FileOp::MakeDirectory { parent, name, .. }
            | FileOp::MakeSymlink { parent, name, .. }
            | FileOp::Unlink { parent, name }
            | FileOp::RemoveDirectory { parent, name } => {
                changed.push(named(parent, name));
                directories.push(*parent);
            }
            FileOp::Rename {
                parent,
                name,
                new_parent,
                new_name,
                ..
            } => {
                changed.extend([named(parent, name), named(new_parent, new_name)]);
                directories.extend([*parent, *new_parent]);
            }
            FileOp::Write { handle, .. }
            | FileOp::Allocate { handle, .. }
            | FileOp::CopyRange { target: handle, .. } => changed.push(opened(handle)),
            FileOp::Open { ino, flags } if flags & libc::O_TRUNC != 0 => changed.push(Some(*ino)),
            _ => {}
        }
        let mut touched: Vec<InodeNo> = changed.into_iter().flatten().collect();
        for ino in &touched {
            self.metadata.invalidate(*ino);
            self.small_files.discard(*ino);
        }
        for directory in directories {
            self.metadata.mark_inexact(directory);
            touched.push(directory);
        }
        touched
    }
}

/// The name of a file that an operation takes away.
fn removed_name(op: &FileOp) -> Option<(InodeNo, &ByName)> {
    match op {
        FileOp::Unlink { parent, name } => Some((*parent, name)),
        FileOp::Rename {
            new_parent,
            new_name,
            ..
        } => Some((*new_parent, new_name)),
        _ => None,
    }
}

/// Whether an operation may change names, attributes or space.
pub fn is_change(op: &FileOp) -> bool {
    match op {
        FileOp::Open { flags, .. } => flags & libc::O_TRUNC != 0,
        op => matches!(
            op,
            FileOp::Write { .. }
                | FileOp::Allocate { .. }
                | FileOp::CopyRange { .. }
                | FileOp::SetXattr { .. }
                | FileOp::RemoveXattr { .. }
                | FileOp::SetAttr { .. }
                | FileOp::Create { .. }
                | FileOp::MakeNode { .. }
                | FileOp::MakeDirectory { .. }
                | FileOp::MakeSymlink { .. }
                | FileOp::MakeLink { .. }
                | FileOp::Unlink { .. }
                | FileOp::RemoveDirectory { .. }
                | FileOp::Rename { .. }
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use bafs_proto::file_op::{AttrChange, BodyRange, DirectoryEntry, FileTime, SetTime, TreeStat};
    use bafs_proto::ids::Epoch;

    use super::super::delegation::{Decision, DelegatedRequest};
    use super::super::inode_map::OpenParameters;
    use super::super::operation_log::Space;
    use super::*;

    const CALLER: Caller = Caller {
        uid: 7,
        gid: 7,
        pid: 1,
    };
    const AMPLE_SPACE: Space = Space {
        bytes: 1 << 30,
        files: 1 << 20,
    };
    const ROOT: InodeNo = InodeNo::ROOT;

    fn attr(ino: InodeNo, mode: u32, nlink: u32) -> Attr {
        Attr {
            ino,
            size: 0,
            blocks: 0,
            atime: FileTime::default(),
            mtime: FileTime::default(),
            ctime: FileTime::default(),
            mode,
            nlink,
            uid: 7,
            gid: 7,
            rdev: 0,
            block_size: 4096,
            btime_ns: 1,
        }
    }

    /// A writer who knows that the root is empty, and how new files look.
    struct Writer {
        delegation: Delegation,
        known: InodeMap,
    }

    impl Writer {
        fn new() -> Self {
            let mut own = Delegation::default();
            own.set_free_space(AMPLE_SPACE, 0);
            own.metadata.store_attr(&attr(ROOT, 0o040_755, 2));
            own.metadata.end_listing(ROOT, 0, Some(BTreeSet::new()));
            own.owning_callers.insert((7, 7));
            own.new_file_attr = Some(attr(InodeNo(9), 0o100_644, 1));
            own.new_directory_attr = Some(attr(InodeNo(9), 0o040_755, 2));
            let known = InodeMap::new(Epoch(1));
            Self {
                delegation: own,
                known,
            }
        }

        fn decide(&mut self, op: &FileOp) -> Decision {
            let data = match op {
                FileOp::Write { data, .. } => vec![1; data.length as usize],
                _ => Vec::new(),
            };
            let asked = DelegatedRequest {
                caller: CALLER,
                op,
                data: &data,
                now: FileTime::default(),
            };
            self.delegation.decide(&mut self.known, asked, false)
        }

        /// Makes a file early; its number and handle.
        fn make(&mut self, name: &str) -> (InodeNo, HandleId) {
            match self.decide(&create(ROOT, name)) {
                Decision::Answer(Ok(FileReply::Opened { handle, attr })) => (attr.ino, handle),
                other => panic!("{other:?}"),
            }
        }

        fn acknowledge_all(&mut self) {
            while !self.delegation.log.is_empty() {
                self.delegation.acknowledge(&mut self.known, None);
            }
        }

        /// The server forgets all and settles nothing.
        fn restart(&mut self) {
            let epoch = Epoch(self.known.epoch().0 + 1);
            self.known.begin_session(epoch);
            self.delegation.log.rewind_sent();
        }

        /// The server is asked directly.
        fn ask(&mut self, op: &FileOp) -> InflightQuery {
            self.delegation.reserve_space(op);
            self.delegation.begin_query(&self.known, op)
        }

        fn receive_answer(&mut self, op: &FileOp, query: InflightQuery, reply: FileReply) {
            let asked = (CALLER, op, query);
            self.delegation
                .end_query(&self.known, asked, &mut Ok(reply));
        }
    }

    fn create(parent: InodeNo, name: &str) -> FileOp {
        FileOp::Create {
            parent,
            name: name.into(),
            mode: 0o644,
            flags: libc::O_RDWR,
        }
    }

    fn write(handle: HandleId, length: u32) -> FileOp {
        FileOp::Write {
            handle,
            offset: 0,
            data: BodyRange { start: 0, length },
            append: true,
        }
    }

    fn chmod(ino: InodeNo, mode: u32) -> FileOp {
        let change = AttrChange {
            mode: Some(mode),
            ..AttrChange::default()
        };
        FileOp::SetAttr {
            ino,
            handle: None,
            change,
        }
    }

    fn is_answered(decision: &Decision) -> bool {
        matches!(decision, Decision::Answer(Ok(_)))
    }

    #[test]
    fn attributes_requested_before_a_change_are_ignored() {
        let mut writer = Writer::new();
        let (ino, handle) = writer.make("a");
        assert!(is_answered(&writer.decide(&write(handle, 100))));
        writer.acknowledge_all();
        let op = FileOp::GetAttr { ino, handle: None };
        let question = writer.ask(&op);
        // Written and brought there while the answer is on its way.
        assert!(is_answered(&writer.decide(&write(handle, 50))));
        writer.acknowledge_all();
        let old = Attr {
            size: 100,
            ..attr(ino, 0o100_644, 1)
        };
        writer.receive_answer(&op, question, FileReply::Attr(old));
        assert!(is_answered(&writer.decide(&write(handle, 1))));
        let last = writer
            .delegation
            .log
            .entry(writer.delegation.log.end_position() - 1);
        let Some(FileOp::Write { offset, .. }) = last.map(|entry| &entry.op) else {
            panic!("{last:?}");
        };
        assert_eq!(*offset, 150, "an append went to the wrong place");
    }

    #[test]
    fn a_reported_mtime_overrides_the_servers_later_time() {
        let mut writer = Writer::new();
        let (ino, handle) = writer.make("a");
        assert!(is_answered(&writer.decide(&write(handle, 100))));
        writer.acknowledge_all();
        let list = FileOp::ReadDirectory {
            handle: HandleId(1),
            cookie: 0,
            bytes_max: 4096,
            plus: true,
        };
        let question = writer.ask(&list);
        let late = FileTime {
            seconds: 9,
            nanoseconds: 0,
        };
        let seen = Attr {
            size: 100,
            mtime: late,
            ctime: late,
            ..attr(ino, 0o100_644, 1)
        };
        let entry = DirectoryEntry {
            ino,
            cookie: 1,
            name: b"a".to_vec(),
            mode: 0o100_644,
            attr: Some(seen),
        };
        let mut answer = Ok(FileReply::Entries(vec![entry]));
        let asked = (CALLER, &list, question);
        writer
            .delegation
            .end_query(&writer.known, asked, &mut answer);
        let Ok(FileReply::Entries(entries)) = answer else {
            panic!("{answer:?}");
        };
        let told = entries[0].attr.expect("as it was asked for");
        assert_eq!((told.size, told.mtime), (100, FileTime::default()));
        assert!(is_answered(&writer.decide(&FileOp::Release { handle })));
        let last = writer
            .delegation
            .log
            .entry(writer.delegation.log.end_position() - 2);
        let Some(FileOp::SetAttr { change, .. }) = last.map(|entry| &entry.op) else {
            panic!("{last:?}");
        };
        let kept = Some(SetTime::At(FileTime::default()));
        assert_eq!(change.mtime, kept, "the server is told");
    }

    #[test]
    fn a_stale_handle_stays_until_its_writes_ran() {
        let mut writer = Writer::new();
        let (ino, handle) = writer.make("a");
        assert!(is_answered(&writer.decide(&write(handle, 100))));
        writer.restart();
        assert!(writer.known.is_stale(handle));
        assert!(is_answered(&writer.decide(&FileOp::Release { handle })));
        assert!(
            writer.known.open_parameters(handle).is_some(),
            "a write needs it"
        );
        writer.acknowledge_all();
        assert!(writer.known.open_parameters(handle).is_none());
        assert!(writer.known.has_inode(ino));
    }

    #[test]
    fn unseen_opens_prevent_early_chmod_and_unlink() {
        let mut writer = Writer::new();
        let (ino, handle) = writer.make("a");
        assert!(is_answered(&writer.decide(&FileOp::Release { handle })));
        writer.acknowledge_all();
        let flags = libc::O_RDONLY;
        let opened = writer.decide(&FileOp::Open { ino, flags });
        let Decision::Answer(Ok(FileReply::Opened { handle, .. })) = opened else {
            panic!("{opened:?}");
        };
        let (parent, name) = (ROOT, b"a".to_vec());
        let unlink = FileOp::Unlink { parent, name };
        assert!(is_answered(&writer.decide(&chmod(ino, 0o640))));
        assert!(!is_answered(&writer.decide(&chmod(ino, 0o200))));
        assert!(!is_answered(&writer.decide(&unlink)));
        assert!(is_answered(&writer.decide(&FileOp::Release { handle })));
        assert!(is_answered(&writer.decide(&chmod(ino, 0o200))));
        assert!(is_answered(&writer.decide(&unlink)));
    }

    #[test]
    fn files_with_several_names_are_not_opened_early() {
        let mut writer = Writer::new();
        let (ino, handle) = writer.make("a");
        assert!(is_answered(&writer.decide(&FileOp::Release { handle })));
        writer.acknowledge_all();
        let flags = libc::O_RDONLY;
        let open = FileOp::Open { ino, flags };
        for (nlink, opens) in [(2, false), (1, true)] {
            let look = FileOp::GetAttr { ino, handle: None };
            let question = writer.ask(&look);
            let told = FileReply::Attr(attr(ino, 0o100_644, nlink));
            writer.receive_answer(&look, question, told);
            assert_eq!(is_answered(&writer.decide(&open)), opens, "{nlink} names");
        }
    }

    #[test]
    fn files_being_removed_are_not_opened_early() {
        let mut writer = Writer::new();
        let (ino, handle) = writer.make("a");
        assert!(is_answered(&writer.decide(&FileOp::Release { handle })));
        writer.acknowledge_all();
        let (parent, name) = (ROOT, b"a".to_vec());
        let rename = FileOp::Rename {
            parent,
            name: b"b".to_vec(),
            new_parent: parent,
            new_name: name,
            flags: 0,
        };
        let look = FileOp::GetAttr { ino, handle: None };
        let earlier = writer.ask(&look);
        let question = writer.ask(&rename);
        // Its attributes come meanwhile, and would say that it may be opened.
        let told = FileReply::Attr(attr(ino, 0o100_644, 1));
        writer.receive_answer(&look, earlier, told.clone());
        let later = writer.ask(&look);
        writer.receive_answer(&look, later, told);
        let flags = libc::O_RDONLY;
        assert!(!is_answered(&writer.decide(&FileOp::Open { ino, flags })));
        writer.receive_answer(&rename, question, FileReply::Done);
    }

    fn rename(name: &str, new_name: &str) -> FileOp {
        FileOp::Rename {
            parent: ROOT,
            name: name.into(),
            new_parent: ROOT,
            new_name: new_name.into(),
            flags: 0,
        }
    }

    #[test]
    fn a_file_is_renamed_early_to_free_names() {
        let mut writer = Writer::new();
        let (ino, handle) = writer.make("a");
        assert!(is_answered(&writer.decide(&rename("a", "b"))));
        let look = |name: &str| FileOp::Lookup {
            parent: ROOT,
            name: name.into(),
        };
        let gone = writer.decide(&look("a"));
        assert!(matches!(gone, Decision::Answer(Err(Errno(libc::ENOENT)))));
        // What is written before the renaming has run is seen under the new name.
        assert!(is_answered(&writer.decide(&write(handle, 10))));
        let found = writer.decide(&look("b"));
        let Decision::Answer(Ok(FileReply::Attr(attr))) = found else {
            panic!("{found:?}");
        };
        assert_eq!((attr.ino, attr.size), (ino, 10));
        // Both names are waited for: each has one operation that tells whether it has run.
        for op in [create(ROOT, "a"), create(ROOT, "b"), rename("b", "c")] {
            assert!(!is_answered(&writer.decide(&op)), "{op:?}");
        }
        writer.acknowledge_all();
        assert_eq!(writer.known.inode_by_name(ROOT, &b"b".to_vec()), Some(ino));
        assert_eq!(writer.known.inode_by_name(ROOT, &b"a".to_vec()), None);
        assert!(is_answered(&writer.decide(&look("b"))));
        assert!(is_answered(&writer.decide(&create(ROOT, "a"))));
        writer.acknowledge_all();
        assert!(
            !is_answered(&writer.decide(&rename("a", "b"))),
            "it replaces"
        );
    }

    #[test]
    fn early_renames_are_sent_without_flags() {
        let mut writer = Writer::new();
        writer.make("a");
        let mut op = rename("a", "b");
        if let FileOp::Rename { flags, .. } = &mut op {
            *flags = libc::RENAME_NOREPLACE;
        }
        assert!(is_answered(&writer.decide(&op)));
        let last = writer
            .delegation
            .log
            .entry(writer.delegation.log.end_position() - 1);
        let sent = last.map(|entry| (&entry.op, &entry.translated.1));
        let Some((FileOp::Rename { flags: 0, .. }, FileOp::Rename { flags: 0, .. })) = sent else {
            panic!("{last:?}");
        };
    }

    #[test]
    fn unresolved_files_are_renamed_by_the_server() {
        let mut writer = Writer::new();
        let (ino, handle) = writer.make("a");
        assert!(is_answered(&writer.decide(&FileOp::Release { handle })));
        writer.acknowledge_all();
        writer.restart();
        let (parent, name) = (ROOT, b"a".to_vec());
        let unlink = FileOp::Unlink { parent, name };
        // Somebody may be looking for it by its name at this moment.
        for op in [rename("a", "b"), unlink] {
            assert!(!is_answered(&writer.decide(&op)), "{op:?}");
        }
        assert!(writer.known.rebind_found(ino, &attr(ino, 0o100_644, 1)));
        assert!(is_answered(&writer.decide(&rename("a", "b"))));
    }

    #[test]
    fn unknown_or_linked_files_are_renamed_by_server() {
        let mut writer = Writer::new();
        let (ino, _) = writer.make("a");
        writer.acknowledge_all();
        assert!(!is_answered(&writer.decide(&rename("never seen", "b"))));
        writer
            .delegation
            .metadata
            .store_attr(&attr(ino, 0o100_644, 2));
        assert!(!is_answered(&writer.decide(&rename("a", "b"))));
        writer
            .delegation
            .metadata
            .store_attr(&attr(ino, 0o100_644, 1));
        assert!(is_answered(&writer.decide(&rename("a", "b"))));
    }

    #[test]
    fn operations_in_closed_directories_go_to_server() {
        for mode in [0o500, 0o600, 0o055] {
            let mut writer = Writer::new();
            assert!(is_answered(&writer.decide(&chmod(ROOT, mode))));
            let refused = writer.decide(&create(ROOT, "a"));
            assert!(!is_answered(&refused), "mode {mode:o}");
        }
    }

    #[test]
    fn unlinking_unknown_names_invalidates_linked_files() {
        let mut writer = Writer::new();
        let linked = InodeNo(50);
        writer
            .delegation
            .metadata
            .store_attr(&attr(linked, 0o100_644, 12));
        writer
            .delegation
            .metadata
            .store_attr(&attr(InodeNo(51), 0o100_644, 1));
        writer.delegation.metadata.add_name(ROOT, &b"old".to_vec());
        let (parent, name) = (ROOT, b"old".to_vec());
        let op = FileOp::Unlink { parent, name };
        let earlier = writer.ask(&FileOp::StatFs);
        let question = writer.ask(&op);
        assert!(writer.delegation.metadata.attr(linked).is_none());
        assert!(writer.delegation.metadata.attr(InodeNo(51)).is_some());
        let look = FileOp::GetAttr {
            ino: linked,
            handle: None,
        };
        let told = FileReply::Attr(attr(linked, 0o100_644, 12));
        let meanwhile = writer.ask(&look);
        writer.receive_answer(&look, meanwhile, told.clone());
        assert!(writer.delegation.metadata.attr(linked).is_none());
        writer.receive_answer(&op, question, FileReply::Done);
        let stat = TreeStat {
            size_bytes: 0,
            free_bytes: 0,
            size_files: 0,
            free_files: 0,
            disk_free_bytes: None,
            disk_free_files: None,
        };
        writer.receive_answer(&FileOp::StatFs, earlier, FileReply::StatFs(stat));
        let after = writer.ask(&look);
        writer.receive_answer(&look, after, told);
        assert!(writer.delegation.metadata.attr(linked).is_some());
    }

    #[test]
    fn outdated_free_space_is_not_promised_twice() {
        let mut writer = Writer::new();
        let ((_, other), (_, handle)) = (writer.make("a"), writer.make("b"));
        let op = FileOp::Allocate {
            handle: other,
            mode: 0,
            offset: 0,
            length: 900 << 20,
        };
        let sent_before = writer.delegation.query_count();
        let question = writer.ask(&op);
        writer.receive_answer(&op, question, FileReply::Done);
        // A batch that ran before it tells of the space as it was then.
        writer.acknowledge_all();
        writer.delegation.set_free_space(AMPLE_SPACE, sent_before);
        assert!(is_answered(&writer.decide(&write(handle, 1000))));
        assert!(!is_answered(&writer.decide(&write(handle, 200 << 20))));
        writer
            .delegation
            .set_free_space(AMPLE_SPACE, writer.delegation.query_count());
        assert!(is_answered(&writer.decide(&write(handle, 200 << 20))));
    }

    fn entry_of(name: &str, attr: Attr, cookie: u64) -> DirectoryEntry {
        DirectoryEntry {
            ino: attr.ino,
            cookie,
            name: name.into(),
            mode: attr.mode,
            attr: Some(attr),
        }
    }

    /// A directory `d` of before, open, of which the program reads a page of one file and the end.
    fn read_directory(writer: &mut Writer, is_changed: bool) -> InodeNo {
        let seen = attr(InodeNo(20), 0o040_755, 2);
        let directory = writer.known.record_lookup(ROOT, &b"d".to_vec(), &seen);
        writer.delegation.metadata.store_attr(&seen);
        writer.delegation.metadata.add_name(ROOT, &b"d".to_vec());
        let opening = OpenParameters {
            ino: directory,
            flags: 0,
            is_directory: true,
        };
        let handle = writer.known.add_handle(opening, HandleId(5));
        let file = attr(InodeNo(21), 0o100_644, 1);
        writer.known.record_lookup(directory, &b"f".to_vec(), &file);
        for (cookie, entries) in [(0, vec![entry_of("f", file, 1)]), (1, Vec::new())] {
            let page = FileOp::ReadDirectory {
                handle,
                cookie,
                bytes_max: 4096,
                plus: true,
            };
            let question = writer.ask(&page);
            writer.receive_answer(&page, question, FileReply::Entries(entries));
            if is_changed && cookie == 0 {
                writer
                    .delegation
                    .metadata
                    .add_name(directory, &b"g".to_vec());
            }
        }
        directory
    }

    #[test]
    fn emptied_directories_are_removed_early() {
        let mut writer = Writer::new();
        let directory = read_directory(&mut writer, false);
        let remove = FileOp::RemoveDirectory {
            parent: ROOT,
            name: "d".into(),
        };
        assert!(!is_answered(&writer.decide(&remove)), "it has a file");
        let unlink = FileOp::Unlink {
            parent: directory,
            name: "f".into(),
        };
        assert!(is_answered(&writer.decide(&unlink)));
        assert!(is_answered(&writer.decide(&remove)));
        let name = "d".into();
        let again = writer.decide(&FileOp::Lookup { parent: ROOT, name });
        assert!(matches!(again, Decision::Answer(Err(Errno(libc::ENOENT)))));
        writer.acknowledge_all();
        assert_eq!(writer.known.inode_by_name(ROOT, &b"d".to_vec()), None);
    }

    #[test]
    fn directories_that_changed_while_listed_stay_unknown() {
        let mut writer = Writer::new();
        let directory = read_directory(&mut writer, true);
        assert!(writer.delegation.metadata.is_worth_listing(directory));
        let unlink = FileOp::Unlink {
            parent: directory,
            name: "f".into(),
        };
        assert!(is_answered(&writer.decide(&unlink)));
        let (parent, name) = (ROOT, "d".into());
        let remove = FileOp::RemoveDirectory { parent, name };
        assert!(!is_answered(&writer.decide(&remove)));
    }

    #[test]
    fn a_listings_reference_passes_to_the_kernel() {
        let mut writer = Writer::new();
        let file = attr(InodeNo(30), 0o100_644, 1);
        let ino = writer.known.record_lookup(ROOT, &b"f".to_vec(), &file);
        writer.delegation.metadata.add_name(ROOT, &b"f".to_vec());
        writer.delegation.metadata.store_attr(&file);
        assert!(writer.delegation.metadata.add_listed(ROOT, ino));
        let (parent, name) = (ROOT, "f".into());
        assert!(is_answered(
            &writer.decide(&FileOp::Lookup { parent, name })
        ));
        assert_eq!(writer.known.forget(ino, 1), Some((file.ino, 1)));
        assert!(writer.delegation.metadata.take_all_listed(ROOT).is_empty());
    }
}
