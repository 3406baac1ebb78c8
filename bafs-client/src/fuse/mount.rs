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
use thiserror::Error;

use super::bridge::{Bridge, Serving};
use super::collected::Collected;
use super::ending::{End, Over, serve_on};
use super::ring::{Refused, Rings};
use super::seats::{Seat, session_threads};
use crate::clock;
use crate::doctor::{connections, mounts};
use crate::limits::{COLLECTED_PART, DETACH};
use crate::logic::mount_table;
use crate::volume::Volume;

const DEVICE: &str = "/dev/fuse";

/// How a mount comes about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountKind {
    /// By `mount(2)`: as root, or in a user name space of our own.
    Own,
    /// On the host, for an ordinary user: by the set-user-id program `fusermount3`.
    Fusermount,
}

/// Why a volume could not be shown.
#[derive(Debug, Error)]
pub enum MountError {
    /// There is no FUSE on this machine.
    #[error(
        "/dev/fuse is missing: load the kernel module (`modprobe fuse`), and in a container \
         start it with `--device /dev/fuse`"
    )]
    NoDevice,
    /// There is FUSE, but not for us.
    #[error("/dev/fuse may not be opened ({0}): ask root for `chmod 666 /dev/fuse`, or be root")]
    DeviceRefused(Errno),
    /// The kernel did not take the mount.
    #[error("cannot mount on {}: {source}; {remedy}", directory.display())]
    Refused {
        /// Where.
        directory: PathBuf,
        /// What the kernel or `fusermount3` answered.
        source: io::Error,
        /// What to do about it.
        remedy: &'static str,
    },
    /// There is no process that would take the mount away should this one die.
    #[error("cannot start the keeper of the mount: {0}")]
    Keeper(io::Error),
    /// The kernel mounted but did not begin to talk.
    #[error("the kernel did not begin the FUSE session: {0}")]
    Handshake(io::Error),
    /// Nobody would answer the kernel.
    #[error(
        "cannot start the thread that serves the mount: {0}; raise the limit of processes \
         (`ulimit -u`)"
    )]
    Thread(io::Error),
}

impl MountError {
    /// What the kernel answered, if it is known.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::NoDevice => None,
            Self::DeviceRefused(errno) => Some(*errno as i32),
            Self::Refused { source, .. }
            | Self::Handshake(source)
            | Self::Keeper(source)
            | Self::Thread(source) => source.raw_os_error(),
        }
    }
}

/// A volume that is mounted and served.
#[derive(Debug)]
pub struct Mounted {
    directory: PathBuf,
    volume: Arc<Volume>,
    /// Number of the kernel's connection, by which it can be aborted.
    connection: Option<u32>,
    fusermount: Option<SessionUnmounter>,
    /// The thread that serves it, if it does not share its readers.
    server: Option<JoinHandle<()>>,
    over: Over,
    is_detached: bool,
    way: String,
    /// Writes that the kernel collects, if it does.
    collected: Option<Collected>,
    /// Its right to readers of its own.
    _seat: Option<Seat>,
}

impl Mounted {
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
            MountKind::Own => Self::mount_by(volume, directory, open_device()?),
            MountKind::Fusermount => {
                // Nobody shows more than one volume in this way.
                let seat = Seat::take();
                let rings = rings(&volume, directory, seat.as_ref());
                let mut begun = mount_by_fusermount(&volume, directory, serving(&rings))?;
                let unmounter = begun.session.unmount_callable();
                Self::serve(volume, directory, begun, (rings, seat), Some(unmounter))
            }
        }
    }

    /// As [`Self::mount`] in a place of one's own, by a device that was opened before.
    ///
    /// # Errors
    /// [`MountError`], with what is missing and what to do.
    pub fn mount_by(
        volume: Arc<Volume>,
        directory: &Path,
        device: OwnedFd,
    ) -> Result<Self, MountError> {
        let seat = Seat::take();
        let rings = rings(&volume, directory, seat.as_ref());
        let serving = match seat {
            Some(_) => serving(&rings),
            None => Serving::Shared,
        };
        let begun = mount_own(&volume, directory, device, serving)?;
        Self::serve(volume, directory, begun, (rings, seat), None)
    }

    fn serve(
        volume: Arc<Volume>,
        directory: &Path,
        Begun { session, bridge }: Begun,
        (rings, seat): (Result<Rings, String>, Option<Seat>),
        fusermount: Option<SessionUnmounter>,
    ) -> Result<Self, MountError> {
        let mut mounted = Self {
            directory: directory.to_owned(),
            volume,
            connection: None,
            fusermount,
            server: None,
            over: Arc::default(),
            is_detached: true,
            way: String::new(),
            collected: bridge.agreed().collected.clone(),
            _seat: seat,
        };
        let rings = match begin(rings, &session, &bridge) {
            Ok(Ok(rings)) => {
                "the kernel asks by a ring for each processor".clone_into(&mut mounted.way);
                Some(rings)
            }
            Ok(Err(why)) => {
                mounted.way = format!("the kernel asks by its device ({why})");
                None
            }
            Err(error) => {
                // It would answer nobody.
                mounted.take_away();
                return Err(MountError::Handshake(error));
            }
        };
        if bridge.serving() == Serving::Shared && mounted.volume.mode().whole_files {
            mounted.way.push_str("; it asks for large files too");
        }
        let over = Arc::clone(&mounted.over);
        match serve_on(session, bridge, (rings, over)) {
            Ok(server) => (mounted.server, mounted.is_detached) = (server, false),
            Err(error) => {
                mounted.take_away();
                return Err(MountError::Thread(error));
            }
        }
        match (&mounted.collected, mounted.volume.mode().collects) {
            (Some(_), _) => mounted.way.push_str("; it collects writes"),
            (None, true) => mounted.way.push_str("; it cannot collect writes"),
            (None, false) => {}
        }
        mounted.tune();
        tracing::debug!(directory = %directory.display(), way = mounted.way, "mounted");
        Ok(mounted)
    }

    /// How the kernel's requests come, and why so, in words.
    pub fn way(&self) -> &str {
        &self.way
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
    pub fn await_closed(&self) {
        if let Some(collected) = &self.collected {
            collected.await_closed(self.volume.fate());
        }
    }

    /// Has the kernel send what it collected for programs that go on. Blocks, for a while at most.
    pub fn sync(&self) {
        if let Some(collected) = self.collected.as_ref().filter(|_| !self.is_over()) {
            collected.sync(self.volume.fate(), &self.directory);
        }
    }

    /// Takes the mount away, at once even if it is in use, and waits until nothing of it is left.
    /// Blocks for two seconds at most.
    pub fn unmount(mut self) {
        self.detach();
    }

    /// How the kernel's connection ended, once it has.
    pub async fn over(&self) -> End {
        let mut over = self.over.subscribe();
        let end = over.wait_for(Option::is_some).await;
        // Its sender is ours.
        end.ok().and_then(|end| *end).unwrap_or(End::Aborted)
    }

    /// Whether the kernel asks nothing any more.
    pub fn is_over(&self) -> bool {
        self.over.borrow().is_some()
    }

    /// The kernel's number of the mount while it is there.
    pub fn id(&self) -> Option<u64> {
        let mounts = mounts::ours_on(&self.directory).ok()?.into_iter();
        let mut own = mounts.filter(|mount| Some(mount.device.1) == self.connection);
        own.next_back().map(|mount| mount.id)
    }

    fn detach(&mut self) {
        if std::mem::replace(&mut self.is_detached, true) {
            return;
        }
        // Its readers may hear of the end later than we do. What lives there now may have the
        // number of our connection.
        if self.is_over() || self.volume.fate().is_over() {
            if self.finishes(DETACH) {
                self.join();
            }
            // The connection was aborted, and ours is dead. A look at somebody else's, that is
            // being made, would wait for it.
            if *self.over.borrow() != Some(End::Unmounted) || self.id().is_some() {
                mounts::take_dead_away(&self.directory);
            }
            return;
        }
        if self.is_on_top() {
            self.take_away();
        }
        // A volume that is lost has no more to say, whoever holds files of it, or sees it in
        // another name space.
        let patience = match self.volume.fate().loss() {
            // Long enough to see that the mount is gone, and the number of its connection with it.
            Some(_) => DETACH / 20,
            None => DETACH / 2,
        };
        if !self.finishes(patience) {
            // Somebody still holds a file of it. Whoever waits for an answer gets an error.
            self.abort();
            if !self.finishes(DETACH / 2) {
                tracing::warn!(
                    "the kernel keeps the connection of {}",
                    self.directory.display()
                );
                return;
            }
        }
        self.join();
    }

    fn finishes(&self, longest: Duration) -> bool {
        let start = clock::now();
        let mut pause = Duration::from_micros(100);
        while !self.is_over() {
            if start.elapsed() >= longest {
                return false;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        true
    }

    /// Nothing of it is left when this returns.
    fn join(&mut self) {
        if let Some(server) = self.server.take() {
            // A panic of the serving thread was reported when it happened.
            let _ = server.join();
        }
    }

    /// Whether a look at the directory meets this mount, and not one that was made there since.
    fn is_on_top(&self) -> bool {
        let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
        let mounts = mount_table::parse(&table);
        let top = mounts.iter().rfind(|mount| mount.point == self.directory);
        match (top, self.connection) {
            (Some(top), Some(connection)) => top.is_ours() && top.device.1 == connection,
            _ => true,
        }
    }

    fn take_away(&mut self) {
        match umount2(&self.directory, MntFlags::MNT_DETACH) {
            // EINVAL: somebody else was faster.
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(Errno::EPERM) if self.fusermount.is_some() => self.ask_fusermount(),
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
    fn ask_fusermount(&self) {
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
        if let Err(error) = connections::abort(connection) {
            tracing::debug!(%error, connection, "cannot abort");
        }
    }

    /// Raises the kernel's read-ahead, and what it may collect of writes, where we may. Without it
    /// everything works, only slower.
    fn tune(&mut self) {
        // Not by a look at the directory: who unmounts at that moment would find it in use.
        let mount = mounts::ours_on(&self.directory).ok();
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
            self.volume.has_read_ahead(u64::from(kib) << 10);
        }
        if self.collected.is_some() {
            set("strict_limit", 0);
            set("max_ratio", COLLECTED_PART);
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.detach();
    }
}

fn config() -> Config {
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(session_threads());
    config
}

fn mount_own(
    volume: &Arc<Volume>,
    directory: &Path,
    device: OwnedFd,
    serving: Serving,
) -> Result<Begun, MountError> {
    let options = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,allow_other,max_read={}",
        device.as_raw_fd(),
        geteuid(),
        getegid(),
        IO_BYTES_MAX
    );
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    if volume.mode().read_only {
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
        refused(
            directory,
            errno.into(),
            "see what is mounted there (`findmnt`)",
        )
    })?;
    started(volume, serving, |bridge| {
        Session::from_fd(bridge, device, SessionACL::All, config())
    })
    .map_err(|error| {
        // The half-made mount would answer nobody.
        let _ = umount2(directory, MntFlags::MNT_DETACH);
        MountError::Handshake(error)
    })
}

/// A session that agreed with the kernel, and the volume that it serves.
struct Begun {
    session: Session<Bridge>,
    bridge: Bridge,
}

/// Starts a session whose bridge can also speak without being asked.
fn started(
    volume: &Arc<Volume>,
    serving: Serving,
    start: impl FnOnce(Bridge) -> io::Result<Session<Bridge>>,
) -> io::Result<Begun> {
    let bridge = Bridge::new(Arc::clone(volume), serving);
    let session = start(bridge.clone())?;
    bridge.notifier.get_or_init(|| session.notifier());
    Ok(Begun { session, bridge })
}

/// Rings for a volume whose operations mostly end in the thread that began them; where answers come
/// from others, a ring would only be one thread more on their way.
fn rings(volume: &Arc<Volume>, directory: &Path, seat: Option<&Seat>) -> Result<Rings, String> {
    if seat.is_none() {
        return Err("volumes beyond the first share their readers".to_owned());
    }
    if !volume.answers_here() {
        return Err("other threads answer most of its operations".to_owned());
    }
    if volume.mode().whole_files {
        return Err("it reads large files by itself, which are opened by the device".to_owned());
    }
    let directory = directory.to_owned();
    Rings::prepare(
        &(Arc::new(move || {
            let directory = directory.clone();
            // Not by the ring's own thread, for which the kernel may have to wait.
            thread::spawn(move || give_up(&directory));
        }) as Arc<dyn Fn() + Send + Sync>),
    )
}

fn serving(rings: &Result<Rings, String>) -> Serving {
    match rings {
        Ok(_) => Serving::Rings,
        Err(_) => Serving::Own,
    }
}

/// Whoever waits for an answer of the volume mounted here gets an error instead.
fn give_up(directory: &Path) {
    let connection = mounts::ours_on(directory).map(|mut all| all.pop());
    let Ok(Some(mount)) = connection else {
        return;
    };
    // The file by which that is done belongs to who mounted it.
    let aborted = connections::abort(mount.device.1);
    let gone = aborted.or_else(|_| {
        umount2(directory, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH).map_err(io::Error::from)
    });
    tracing::error!(?gone, "{} is given up: a ring failed", directory.display());
}

/// Has the kernel ask by rings if it agreed to; otherwise says why it does not.
fn begin(
    rings: Result<Rings, String>,
    session: &Session<Bridge>,
    bridge: &Bridge,
) -> io::Result<Result<Rings, String>> {
    let rings = match rings {
        Ok(rings) if bridge.agreed().ring => rings,
        Ok(rings) => {
            rings.stop();
            return Ok(Err("the kernel has no rings for files".to_owned()));
        }
        Err(why) => return Ok(Err(why)),
    };
    match rings.start(session.as_fd(), bridge) {
        Ok(Ok(())) => Ok(Ok(rings)),
        Ok(Err(Refused(why))) => {
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
    serving: Serving,
) -> Result<Begun, MountError> {
    drop(open_device()?);
    let mut options = vec![
        MountOption::FSName(format!("bafs:{}", volume.name())),
        MountOption::Subtype("bafs".to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoSuid,
        MountOption::NoDev,
    ];
    if volume.mode().read_only {
        options.push(MountOption::RO);
    }
    let mut first = config();
    first.mount_options = options.clone();
    first.mount_options.push(MountOption::AutoUnmount);
    let mut second = config();
    second.mount_options = options;
    second.acl = SessionACL::Owner;
    let by = |config| {
        started(volume, serving, |bridge| {
            Session::new(bridge, directory, config)
        })
    };
    by(&first)
        .or_else(|_| by(&second))
        .map_err(|error| refused(directory, error, "install fusermount3 (package fuse3)"))
}

/// What the kernel or `fusermount3` answered, and what to do about it: `other` where that is not
/// known.
fn refused(directory: &Path, source: io::Error, other: &'static str) -> MountError {
    let remedy = match source.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EPERM | Errno::EACCES) => {
            "run as root, or let user name spaces be used (`bafs doctor` tells what is missing)"
        }
        Some(Errno::ENODEV) => "the kernel has no FUSE: `modprobe fuse`",
        Some(Errno::ENOENT | Errno::ENOTDIR) => "give an existing directory",
        _ => other,
    };
    MountError::Refused {
        directory: directory.to_owned(),
        source,
        remedy,
    }
}
