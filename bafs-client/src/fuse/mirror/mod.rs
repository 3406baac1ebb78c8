//! A directory of this machine as a file system that records who uses what: for profiles of
//! programs. It holds no data and has no limit.
//!
//! Files are opened for direct I/O, so that each call of a program comes here as it is. Pages of
//! mappings come one by one, because the mirror asks the kernel for no read-ahead. Both are slow,
//! and both are what is measured.

mod conversions;
mod file_table;
mod mirror_file_system;
mod requests;

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fuser::{BackgroundSession, Config, Session, SessionACL};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{getegid, geteuid};

use self::mirror_file_system::MirrorFileSystem;
use super::mount::open_device;
use super::mount_error::{MountError, mount_refusal};
use crate::trace_recorder::TraceRecorder;

/// Programs of a job that wait for the mirror at once are few; a second thread serves one program
/// while another one's data come from the disk.
const THREADS: usize = 2;

/// A mirror that is mounted; unmounted when it is dropped.
#[derive(Debug)]
pub(crate) struct MirrorMount {
    directory: PathBuf,
    session: Option<BackgroundSession>,
}

impl MirrorMount {
    /// Shows `source` on `directory`, and records what is used by the path `shown`.
    ///
    /// # Errors
    /// [`MountError`], with what is missing and what to do.
    pub(crate) fn mount(
        (source, shown): (&Path, &str),
        directory: &Path,
        recorder: &Arc<TraceRecorder>,
    ) -> Result<Self, MountError> {
        let device = open_device()?;
        let options = format!(
            "fd={},rootmode=40000,user_id={},group_id={},default_permissions,allow_other",
            device.as_raw_fd(),
            geteuid(),
            getegid(),
        );
        mount(
            Some("bafs:profile"),
            directory,
            Some("fuse.bafs"),
            MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
            Some(options.as_str()),
        )
        .map_err(|errno| mount_refusal(directory, errno.into(), "see `findmnt`"))?;
        let mut config = Config::default();
        config.acl = SessionACL::All;
        config.n_threads = Some(THREADS);
        let files = MirrorFileSystem::new(source, shown, Arc::clone(recorder));
        let session = Session::from_fd(files, device, SessionACL::All, config);
        match session.and_then(Session::spawn) {
            Ok(session) => Ok(Self {
                directory: directory.to_owned(),
                session: Some(session),
            }),
            Err(error) => {
                let _ = umount2(directory, MntFlags::MNT_DETACH);
                Err(MountError::Handshake(error))
            }
        }
    }
}

impl Drop for MirrorMount {
    fn drop(&mut self) {
        if let Err(errno) = umount2(&self.directory, MntFlags::MNT_DETACH) {
            tracing::warn!(%errno, "cannot detach {}", self.directory.display());
        }
        if let Some(session) = self.session.take() {
            // The kernel has sent what it kept when the last user is gone.
            let _ = session.guard.join();
        }
    }
}
