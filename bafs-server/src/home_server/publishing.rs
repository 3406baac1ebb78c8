//! Gives a whole upload its name in the export. Takes no bytes, and decides no commit.

use std::fs;

use bafs_proto::ids::ExtractionId;
use bafs_proto::path::to_bytes;
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fsync, renameat, statat};
use rustix::io::Errno;

use super::export::{ExportEntry, file_type, system_error};
use super::packs::gone;
use super::puts::{DATA, Phase, Puts, UploadRecord, fault, parted};

impl Puts {
    /// Gives the checked file its name, durably. It may have it already.
    pub(super) fn publish(
        &self,
        extract: ExtractionId,
        upload: &UploadRecord,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<()> {
        let (above, name) = parted(&upload.path);
        let parent = self.export.make_directory(above, allow)?;
        self.check_destination(&parent, &upload.path, allow)?;
        let place = self.place(extract);
        // What was checked was sealed: another length means that somebody changed it since.
        let length = fs::symlink_metadata(place.join(DATA)).map(|data| data.len());
        match upload.phase {
            Phase::Committing { size, .. } if length.is_ok_and(|length| length != size) => {
                return self.restart_upload(extract, upload);
            }
            _ => {}
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let source =
            rustix::fs::open(&place, flags, Mode::empty()).map_err(|error| fault(&place, error))?;
        match renameat(&source, DATA, &parent.fd, &*to_bytes(name)) {
            Ok(()) => {}
            Err(Errno::NOENT) if fs::symlink_metadata(place.join(DATA)).is_err() => {
                self.check_published(extract, upload, &parent)?;
            }
            Err(error) => return Err(system_error(&upload.path, error)),
        }
        fsync(parent.open_directory()?).map_err(|error| system_error(&upload.path, error))
    }

    /// Checks that a file has its name whose bytes are not where they came: then it was given
    /// before an interruption. Otherwise they are lost, and the upload begins anew.
    fn check_published(
        &self,
        extract: ExtractionId,
        upload: &UploadRecord,
        parent: &ExportEntry,
    ) -> Result<()> {
        let (_, name) = parted(&upload.path);
        let there = match statat(&parent.fd, &*to_bytes(name), AtFlags::SYMLINK_NOFOLLOW) {
            Err(error) if error != Errno::NOENT => return Err(system_error(&upload.path, error)),
            there => there.ok(),
        };
        let file = there.filter(|there| file_type(there) == FileType::RegularFile);
        let found = file.and_then(|file| u64::try_from(file.st_size).ok());
        match upload.phase {
            // To read all of it would take as long as the upload, and whoever changed it since must
            // not lose that; an earlier result under this name has mostly another size.
            Phase::Committing { size, .. } | Phase::Done { size, .. } if found == Some(size) => {
                return Ok(());
            }
            _ => {}
        }
        self.restart_upload(extract, upload)
    }

    /// Has an upload sent again of which the bytes are lost.
    fn restart_upload(&self, extract: ExtractionId, upload: &UploadRecord) -> Result<()> {
        let anew = UploadRecord {
            phase: Phase::Receiving,
            ..upload.clone()
        };
        self.store(extract, &anew)?;
        Err(gone(&upload.path))
    }

    /// Checks that a file may have its name in the directory to which its path led.
    pub(super) fn check_destination(
        &self,
        parent: &ExportEntry,
        path: &str,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<()> {
        let (_, name) = parted(path);
        let place = parent.child_path(name);
        allow(&place).map_err(|error| self.export.redirected_error(path, &place, error))?;
        if self.export.is_own_name(&parent.stat, name) {
            let text = format!("'{path}' cannot be a file");
            return Err(Error::new(ErrorCode::BadPath, text));
        }
        Ok(())
    }
}
