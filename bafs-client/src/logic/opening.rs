//! What the writer of a volume opens and closes before the server does.

use bafs_proto::file_op::{AttrChange, FileOp, FileReply, SetTime};
use bafs_proto::ids::{HandleId, InodeNo};
use nix::libc;

use super::delegation::{Asked, Decision, Delegation};
use super::known::{Known, Opening};
use super::log::Room;

impl Delegation {
    /// Opens a file, if it surely opens at the server.
    pub(super) fn open(
        &mut self,
        known: &mut Known,
        asked: Asked<'_>,
        ino: InodeNo,
        flags: i32,
    ) -> Option<Decision> {
        let attr = self.image.attr(ino)?;
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let needed = if writes { 0o600 } else { 0o400 };
        let is_sure = attr.is_regular() && attr.nlink > 0 && attr.mode & needed == needed;
        if !is_sure || !known.opens_surely() || flags & libc::O_TRUNC != 0 {
            return None;
        }
        let opening = Opening {
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
            let handle = known.open_unseen(opening);
            return Some(Decision::Answered(Ok(FileReply::Opened { handle, attr })));
        }
        let Ok(translated) = known.translate(asked.op) else {
            return Some(Decision::Provide);
        };
        let (handle, given) = known.open_given(opening);
        let made = (None, Some(given));
        self.append(
            known,
            asked,
            translated,
            (made, [Some(ino), None, None], Room::default()),
        );
        Some(Decision::Answered(Ok(FileReply::Opened { handle, attr })))
    }

    /// Closes a file.
    pub(super) fn release(
        &mut self,
        known: &mut Known,
        asked: Asked<'_>,
        handle: HandleId,
    ) -> Decision {
        let Some(Opening { ino, .. }) = known.opening(handle) else {
            return self.ask_after_all();
        };
        self.tell_times(known, asked, ino);
        let is_needless = known.is_untold(handle) || self.log.busy(ino).is_none();
        if known.is_stale(handle) && is_needless {
            known.close(handle);
            return Decision::Answered(Ok(FileReply::Done));
        }
        // One that a restart made stale stays known until what is in the log has run with it.
        let about = [Some(ino), None, None];
        let effect = ((None, None), about, Room::default());
        match known.translate(asked.op) {
            Ok(translated) => self.append(known, asked, translated, effect),
            Err(_) => self.append_untranslated(asked, effect),
        }
        Decision::Answered(Ok(FileReply::Done))
    }

    /// The server is to keep the time of change that programs were told.
    pub(super) fn tell_times(&mut self, known: &Known, asked: Asked<'_>, ino: InodeNo) {
        let Some(mtime) = self.image.take_owed_time(ino) else {
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
        let (asked, about) = (Asked { op: &op, ..asked }, [Some(ino), None, None]);
        let effect = ((None, None), about, Room::default());
        match known.translate(&op) {
            Ok(translated) => self.append(known, asked, translated, effect),
            // What is in the log is shown to a restarted server in any case.
            Err(_) if self.log.busy(ino).is_some() => self.append_untranslated(asked, effect),
            // A file that it would have to be shown for this only keeps that server's time.
            Err(_) => {}
        }
    }
}
