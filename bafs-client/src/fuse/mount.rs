//! Mounts a volume and serves it until it is unmounted; nothing of the kernel's requests is
//! looked at here.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bafs_proto::limits::IO_BYTES_MAX;
use fuser::{Config, MountOption, Session, SessionACL, SessionUnmounter};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{getegid, geteuid};

use super::file_system::{ReaderMode, VolumeFileSystem};
use super::mount_error::{MountError, mount_refusal};
use super::reader_slots::{ReaderSlot, session_thread_count};
use super::ring::{RingRefused, Rings};
use super::serving::serve_until_end;
use super::write_back::WriteBackTracker;
use crate::clock;
use crate::connection_end::{ConnectionEnd, ConnectionEndSender};
use crate::doctor::{connections, mounts};
use crate::limits::{DETACH_TIMEOUT, WRITE_BACK_PERCENT_MAX};
use crate::logic::mount_table;
use crate::sandbox::Access;
use crate::tree::DataPath;
use crate::volume::{FileReads, KernelCache, Volume};

const DEVICE: &str = "/dev/fuse";

/// How a volume is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountKind {
    /// By `mount(2)`: as root, or in a user name space of our own.
    MountSystemCall,
    /// On the host, for an ordinary user: by the set-user-id program `fusermount3`.
    Fusermount,
}

/// A volume that is mounted and served.
#[derive(Debug)]
pub struct FuseMount {
    directory: PathBuf,
    volume: Arc<Volume>,
    /// Number of the kernel's connection, by which it can be aborted.
    connection: Option<u32>,
    fusermount: Option<SessionUnmounter>,
    /// The thread that serves it, if it does not share its readers.
    reader_thread: Option<JoinHandle<()>>,
    connection_end: ConnectionEndSender,
    is_detached: bool,
    transport: String,
    /// Writes that the kernel collects, if it does.
    write_back: Option<WriteBackTracker>,
    /// Its right to readers of its own.
    _reader_slot: Option<ReaderSlot>,
}

impl FuseMount {
    /// Mounts a volume on an existing directory and serves it in threads of its own. Blocks for
    /// the kernel's answer.
    ///
    /// # Errors
    /// [`MountError`], with what is missing and what to do.
    pub fn mount(
        volume: Arc<Volume>,
        directory: &Path,
        kind: MountKind,
    ) -> Result<Self, MountError> {
        match kind {
            MountKind::MountSystemCall => {
                Self::mount_with_device(volume, directory, open_device()?)
            }
            MountKind::Fusermount => {
                // Nobody shows more than one volume in this way.
                let seat = ReaderSlot::acquire();
                let rings = prepare_rings(&volume, directory, seat.as_ref());
                let mut begun =
                    mount_by_fusermount(&volume, directory, choose_reader_mode(&rings))?;
                let unmounter = begun.session.unmount_callable();
                Self::serve(volume, directory, begun, (rings, seat), Some(unmounter))
            }
        }
    }

    /// As [`Self::mount`] in a place of one's own, by a device that was opened before.
    ///
    /// # Errors
    /// [`MountError`], with what is missing and what to do.
    pub fn mount_with_device(
        volume: Arc<Volume>,
        directory: &Path,
        device: OwnedFd,
    ) -> Result<Self, MountError> {
        let seat = ReaderSlot::acquire();
        let rings = prepare_rings(&volume, directory, seat.as_ref());
        let serving = match seat {
            Some(_) => choose_reader_mode(&rings),
            None => ReaderMode::SharedThreads,
        };
        let begun = mount_with_system_call(&volume, directory, device, serving)?;
        Self::serve(volume, directory, begun, (rings, seat), None)
    }

    fn serve(
        volume: Arc<Volume>,
        directory: &Path,
        StartedSession { session, bridge }: StartedSession,
        (rings, seat): (Result<Rings, String>, Option<ReaderSlot>),
        fusermount: Option<SessionUnmounter>,
    ) -> Result<Self, MountError> {
        let mut mounted = Self {
            directory: directory.to_owned(),
            volume,
            connection: None,
            fusermount,
            reader_thread: None,
            connection_end: Arc::default(),
            is_detached: true,
            transport: String::new(),
            write_back: bridge.features().write_back.clone(),
            _reader_slot: seat,
        };
        let rings = match start_rings(rings, &session, &bridge) {
            Ok(Ok(rings)) => {
                "the kernel sends requests through a ring per processor"
                    .clone_into(&mut mounted.transport);
                Some(rings)
            }
            Ok(Err(why)) => {
                mounted.transport = format!("the kernel sends requests through /dev/fuse ({why})");
                None
            }
            Err(error) => {
                // It would answer nobody.
                mounted.detach_mount();
                return Err(MountError::Handshake(error));
            }
        };
        if bridge.reader_mode() == ReaderMode::SharedThreads
            && mounted.volume.mode().file_reads == FileReads::Passthrough
        {
            mounted.transport.push_str("; it requests large files, too");
        }
        let over = Arc::clone(&mounted.connection_end);
        match serve_until_end(session, bridge, (rings, over)) {
            Ok(server) => (mounted.reader_thread, mounted.is_detached) = (server, false),
            Err(error) => {
                mounted.detach_mount();
                return Err(MountError::Thread(error));
            }
        }
        match (&mounted.write_back, mounted.volume.mode().kernel_cache) {
            (Some(_), _) => mounted.transport.push_str("; it caches writes"),
            (None, KernelCache::WriteBack) => {
                mounted.transport.push_str("; it cannot cache writes")
            }
            (None, _) => {}
        }
        mounted.tune_kernel();
        tracing::debug!(directory = %directory.display(), way = mounted.transport, "mounted");
        Ok(mounted)
    }

    /// How the kernel's requests come, and why so, in words.
    pub fn transport(&self) -> &str {
        &self.transport
    }

    /// What is mounted.
    pub fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    /// Where it is mounted.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Waits until the kernel has sent what it collected for processes that are dead. Blocks.
    pub fn wait_until_closed(&self) {
        if let Some(collected) = &self.write_back {
            collected.wait_until_closed(self.volume.health());
        }
    }

    /// Has the kernel send what it collected for programs that go on. Blocks, for a while at most.
    pub fn sync(&self) {
        if let Some(collected) = self.write_back.as_ref().filter(|_| !self.has_ended()) {
            collected.sync(self.volume.health(), &self.directory);
        }
    }

    /// Takes the mount away, at once even if it is in use, and waits until nothing of it is left.
    /// Blocks for two seconds at most.
    pub fn unmount(mut self) {
        self.detach();
    }

    /// How the kernel's connection ended, once it has.
    pub async fn wait_for_end(&self) -> ConnectionEnd {
        let mut over = self.connection_end.subscribe();
        let end = over.wait_for(Option::is_some).await;
        // Its sender is ours.
        end.ok()
            .and_then(|end| *end)
            .unwrap_or(ConnectionEnd::Aborted)
    }

    /// Whether the kernel asks nothing any more.
    pub fn has_ended(&self) -> bool {
        self.connection_end.borrow().is_some()
    }

    /// The kernel's number of the mount while it is there.
    pub fn mount_id(&self) -> Option<u64> {
        let mounts = mounts::own_mounts_on(&self.directory).ok()?.into_iter();
        let mut own = mounts.filter(|mount| Some(mount.device.1) == self.connection);
        own.next_back().map(|mount| mount.id)
    }

    fn detach(&mut self) {
        if std::mem::replace(&mut self.is_detached, true) {
            return;
        }
        // Its readers may hear of the end later than we do. What lives there now may have the
        // number of our connection.
        if self.has_ended() || self.volume.health().connection_end().is_some() {
            if self.has_ended_within(DETACH_TIMEOUT) {
                self.join_reader();
            }
            // The connection was aborted, and ours is dead. A look at somebody else's, that is
            // being made, would wait for it.
            if *self.connection_end.borrow() != Some(ConnectionEnd::Unmounted)
                || self.mount_id().is_some()
            {
                mounts::detach_dead_mounts(&self.directory);
            }
            return;
        }
        if self.is_on_top() {
            self.detach_mount();
        }
        // A volume that is lost has no more to say, whoever holds files of it, or sees it in
        // another name space.
        let timeout = match self.volume.health().loss() {
            // Long enough to see that the mount is gone, and the number of its connection with it.
            Some(_) => DETACH_TIMEOUT / 20,
            None => DETACH_TIMEOUT / 2,
        };
        if !self.has_ended_within(timeout) {
            // Somebody still holds a file of it. Whoever waits for an answer gets an error.
            self.abort();
            if !self.has_ended_within(DETACH_TIMEOUT / 2) {
                tracing::warn!(
                    "the kernel keeps the connection of {}",
                    self.directory.display()
                );
                return;
            }
        }
        self.join_reader();
    }

    fn has_ended_within(&self, longest: Duration) -> bool {
        let start = clock::now();
        let mut pause = Duration::from_micros(100);
        while !self.has_ended() {
            if start.elapsed() >= longest {
                return false;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        true
    }

    /// Nothing of it is left when this returns.
    fn join_reader(&mut self) {
        if let Some(server) = self.reader_thread.take() {
            // A panic of the serving thread was reported when it happened.
            let _ = server.join();
        }
    }

    /// Whether a look at the directory meets this mount, and not one that was made there since.
    fn is_on_top(&self) -> bool {
        let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
        let mounts = mount_table::parse_mount_table(&table);
        let top = mounts
            .iter()
            .rfind(|mount| mount.mount_point == self.directory);
        match (top, self.connection) {
            (Some(top), Some(connection)) => top.is_ours() && top.device.1 == connection,
            _ => true,
        }
    }

    fn detach_mount(&mut self) {
        match umount2(&self.directory, MntFlags::MNT_DETACH) {
            // EINVAL: somebody else was faster.
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(Errno::EPERM) if self.fusermount.is_some() => self.unmount_by_fusermount(),
            Err(errno) => tracing::warn!(%errno, "cannot detach {}", self.directory.display()),
        }
        if let Some(unmounter) = &mut self.fusermount
            && let Err(error) = unmounter.unmount()
        {
            tracing::debug!(%error, "fusermount3 does not stop watching");
        }
    }

    /// The `fusermount3` that watches this process takes only dead mounts away, so one that lives
    /// is taken away by another.
    fn unmount_by_fusermount(&self) {
        let asked = Command::new("fusermount3")
            .args(["-u", "-z", "-q", "--"])
            .arg(&self.directory)
            .status();
        if !asked.as_ref().is_ok_and(|status| status.success()) {
            tracing::warn!(?asked, "cannot detach {}", self.directory.display());
        }
    }

    /// Makes the kernel give up: every call on the volume fails at once, for good. Needs root.
    pub fn abort(&self) {
        let Some(connection) = self.connection else {
            return;
        };
        if let Err(error) = connections::abort_connection(connection) {
            tracing::debug!(%error, connection, "cannot abort");
        }
    }

    /// Raises the kernel's read-ahead, and what it may collect of writes, where we may. Without it
    /// everything works, only slower.
    fn tune_kernel(&mut self) {
        // Not by a look at the directory: who unmounts at that moment would find it in use.
        let mount = mounts::own_mounts_on(&self.directory).ok();
        let Some((major, minor)) = mount.and_then(|mut all| Some(all.pop()?.device)) else {
            return;
        };
        self.connection = Some(minor);
        let set = |name: &str, value: u32| {
            let path = format!("/sys/class/bdi/{major}:{minor}/{name}");
            let set = fs::write(&path, value.to_string());
            set.inspect_err(|error| tracing::debug!(%error, path, "stays as it is"))
                .is_ok()
        };
        let kib = self.volume.read_ahead_kib();
        if set("read_ahead_kb", kib) {
            self.volume.set_read_ahead_bytes(u64::from(kib) << 10);
        }
        if self.write_back.is_some() {
            set("strict_limit", 0);
            set("max_ratio", WRITE_BACK_PERCENT_MAX);
        }
    }
}

impl Drop for FuseMount {
    fn drop(&mut self) {
        self.detach();
    }
}

fn session_config() -> Config {
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(session_thread_count());
    config
}

fn mount_with_system_call(
    volume: &Arc<Volume>,
    directory: &Path,
    device: OwnedFd,
    serving: ReaderMode,
) -> Result<StartedSession, MountError> {
    let options = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,allow_other,max_read={}",
        device.as_raw_fd(),
        geteuid(),
        getegid(),
        IO_BYTES_MAX
    );
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    if volume.mode().access == Access::ReadOnly {
        flags |= MsFlags::MS_RDONLY;
    }
    let source = format!("bafs:{}", volume.name());
    mount(
        Some(source.as_str()),
        directory,
        Some("fuse.bafs"),
        flags,
        Some(options.as_str()),
    )
    .map_err(|errno| {
        mount_refusal(
            directory,
            errno.into(),
            "see what is mounted there (`findmnt`)",
        )
    })?;
    start_session(volume, serving, |bridge| {
        Session::from_fd(bridge, device, SessionACL::All, session_config())
    })
    .map_err(|error| {
        // The half-made mount would answer nobody.
        let _ = umount2(directory, MntFlags::MNT_DETACH);
        MountError::Handshake(error)
    })
}

/// A session that agreed with the kernel, and the volume that it serves.
struct StartedSession {
    session: Session<VolumeFileSystem>,
    bridge: VolumeFileSystem,
}

/// Starts a session whose bridge can also speak without being asked.
fn start_session(
    volume: &Arc<Volume>,
    serving: ReaderMode,
    start: impl FnOnce(VolumeFileSystem) -> io::Result<Session<VolumeFileSystem>>,
) -> io::Result<StartedSession> {
    let bridge = VolumeFileSystem::new(Arc::clone(volume), serving);
    let session = start(bridge.clone())?;
    bridge.notifier.get_or_init(|| session.notifier());
    Ok(StartedSession { session, bridge })
}

/// Rings for a volume whose operations mostly end in the thread that began them; where answers come
/// from others, a ring would only be one thread more on their way.
fn prepare_rings(
    volume: &Arc<Volume>,
    directory: &Path,
    slot: Option<&ReaderSlot>,
) -> Result<Rings, String> {
    if slot.is_none() {
        return Err("volumes beyond the first share their readers".to_owned());
    }
    if volume.data_path() != DataPath::Inline {
        return Err("rings are not faster where a server or blocks give the answers".to_owned());
    }
    if volume.mode().file_reads == FileReads::Passthrough {
        return Err("it reads large files by itself, which are opened by the device".to_owned());
    }
    let directory = directory.to_owned();
    Rings::prepare(
        &(Arc::new(move || {
            let directory = directory.clone();
            // Not by the ring's own thread, for which the kernel may have to wait.
            thread::spawn(move || abort_mount(&directory));
        }) as Arc<dyn Fn() + Send + Sync>),
    )
}

fn choose_reader_mode(rings: &Result<Rings, String>) -> ReaderMode {
    match rings {
        Ok(_) => ReaderMode::Rings,
        Err(_) => ReaderMode::OwnThreads,
    }
}

/// Whoever waits for an answer of the volume mounted here gets an error instead.
fn abort_mount(directory: &Path) {
    let connection = mounts::own_mounts_on(directory).map(|mut all| all.pop());
    let Ok(Some(mount)) = connection else {
        return;
    };
    // The file by which that is done belongs to who mounted it.
    let aborted = connections::abort_connection(mount.device.1);
    let gone = aborted.or_else(|_| {
        umount2(directory, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH).map_err(io::Error::from)
    });
    tracing::error!(?gone, "{} is given up: a ring failed", directory.display());
}

/// Has the kernel ask by rings if it agreed to; otherwise says why it does not.
fn start_rings(
    rings: Result<Rings, String>,
    session: &Session<VolumeFileSystem>,
    bridge: &VolumeFileSystem,
) -> io::Result<Result<Rings, String>> {
    let rings = match rings {
        Ok(rings) if bridge.features().has_rings => rings,
        Ok(rings) => {
            rings.stop();
            return Ok(Err("the kernel has no rings for files".to_owned()));
        }
        Err(why) => return Ok(Err(why)),
    };
    match rings.start(session.as_fd(), bridge) {
        Ok(Ok(())) => Ok(Ok(rings)),
        Ok(Err(RingRefused(why))) => {
            rings.stop();
            Ok(Err(why))
        }
        Err(error) => {
            rings.stop();
            Err(error)
        }
    }
}

/// Opens the kernel's end of a mount to come.
///
/// # Errors
/// [`MountError`], with what is missing and what to do.
pub fn open_device() -> Result<OwnedFd, MountError> {
    match File::options().read(true).write(true).open(DEVICE) {
        Ok(device) => Ok(device.into()),
        Err(error) => match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOENT | Errno::ENXIO | Errno::ENODEV) | None => Err(MountError::NoDevice),
            Some(errno) => Err(MountError::DeviceRefused(errno)),
        },
    }
}

/// Asks for other users' access and for an automatic end first, as far as `/etc/fuse.conf` lets.
fn mount_by_fusermount(
    volume: &Arc<Volume>,
    directory: &Path,
    serving: ReaderMode,
) -> Result<StartedSession, MountError> {
    drop(open_device()?);
    let mut options = vec![
        MountOption::FSName(format!("bafs:{}", volume.name())),
        MountOption::Subtype("bafs".to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoSuid,
        MountOption::NoDev,
    ];
    if volume.mode().access == Access::ReadOnly {
        options.push(MountOption::RO);
    }
    let mut first = session_config();
    first.mount_options = options.clone();
    first.mount_options.push(MountOption::AutoUnmount);
    let mut second = session_config();
    second.mount_options = options;
    second.acl = SessionACL::Owner;
    let by = |config| {
        start_session(volume, serving, |bridge| {
            Session::new(bridge, directory, config)
        })
    };
    by(&first)
        .or_else(|_| by(&second))
        .map_err(|error| mount_refusal(directory, error, "install fusermount3 (package fuse3)"))
}
