//! What the writer of a volume opens and closes before the server does.

use bafs_proto::file_op::{AttrChange, FileOp, FileReply, SetTime};
use bafs_proto::ids::{HandleId, InodeNo};
use nix::libc;

use super::delegation::{Decision, DelegatedRequest, Delegation};
use super::inode_map::{InodeMap, OpenParameters};
use super::operation_log::Space;

impl Delegation {
    /// Opens a file, if it surely opens at the server.
    pub(super) fn open_early(
        &mut self,
        inodes: &mut InodeMap,
        request: DelegatedRequest<'_>,
        ino: InodeNo,
        flags: i32,
    ) -> Option<Decision> {
        let attr = self.metadata.attr(ino)?;
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let needed = if writes { 0o600 } else { 0o400 };
        let is_sure = attr.is_regular() && attr.nlink > 0 && attr.mode & needed == needed;
        if !is_sure || !inodes.has_early_handle() || flags & libc::O_TRUNC != 0 {
            return None;
        }
        let opening = OpenParameters {
            ino,
            flags,
            is_directory: false,
        };
        if !writes && attr.nlink > 1 {
            // Not all of many names are known here: it could lose one unnoticed, and with it the
            // way in which the server finds it.
            return None;
        }
        if !writes {
            // The page cache may have all that is read.
            let handle = inodes.open_deferred(opening);
            return Some(Decision::Answer(Ok(FileReply::Opened { handle, attr })));
        }
        let Ok(translated) = inodes.translate(request.op) else {
            return Some(Decision::ProvideObjects);
        };
        let (handle, given) = inodes.open_numbered(opening);
        let made = (None, Some(given));
        self.append(
            inodes,
            request,
            translated,
            (made, [Some(ino), None, None], Space::default()),
        );
        Some(Decision::Answer(Ok(FileReply::Opened { handle, attr })))
    }

    /// Closes a file.
    pub(super) fn release_early(
        &mut self,
        inodes: &mut InodeMap,
        request: DelegatedRequest<'_>,
        handle: HandleId,
    ) -> Decision {
        let Some(OpenParameters { ino, .. }) = inodes.open_parameters(handle) else {
            return self.query_after_log();
        };
        self.append_pending_times(inodes, request, ino);
        let is_needless = inodes.is_deferred(handle) || self.log.last_position_of(ino).is_none();
        if inodes.is_stale(handle) && is_needless {
            inodes.close(handle);
            return Decision::Answer(Ok(FileReply::Done));
        }
        // One that a restart made stale stays known until what is in the log has run with it.
        let about = [Some(ino), None, None];
        let effect = ((None, None), about, Space::default());
        match inodes.translate(request.op) {
            Ok(translated) => self.append(inodes, request, translated, effect),
            Err(_) => self.append_untranslated(request, effect),
        }
        Decision::Answer(Ok(FileReply::Done))
    }

    /// The server is to keep the time of change that programs were told.
    pub(super) fn append_pending_times(
        &mut self,
        inodes: &InodeMap,
        request: DelegatedRequest<'_>,
        ino: InodeNo,
    ) {
        let Some(mtime) = self.metadata.take_pending_time(ino) else {
            return;
        };
        let op = FileOp::SetAttr {
            ino,
            handle: None,
            change: AttrChange {
                mtime: Some(SetTime::At(mtime)),
                ..AttrChange::default()
            },
        };
        let (asked, about) = (
            DelegatedRequest { op: &op, ..request },
            [Some(ino), None, None],
        );
        let effect = ((None, None), about, Space::default());
        match inodes.translate(&op) {
            Ok(translated) => self.append(inodes, asked, translated, effect),
            // What is in the log is shown to a restarted server in any case.
            Err(_) if self.log.last_position_of(ino).is_some() => {
                self.append_untranslated(asked, effect)
            }
            // A file that it would have to be shown for this only keeps that server's time.
            Err(_) => {}
        }
    }
}
