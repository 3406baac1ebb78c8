//! Mounts on a directory of this host: they come, go when asked to, and never stay dead.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, exec_job, mounts_matching, printed_text, report_skip};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn start_cluster(name: &str) -> Result<Option<TestCluster>> {
    let world = exec_job::start_cluster(name, "300MB")?;
    if let Some(world) = &world {
        world.run_json(&["volume", "create", "v", "--node", "n1", "--size", "50MB"])?;
    }
    Ok(world)
}

/// The same for root, who unmounts at once, and with a node whose door is shut if wished.
fn start_cluster_with_path(name: &str, has_fd_passing: bool) -> Result<Option<TestCluster>> {
    if !nix::unistd::geteuid().is_root() {
        report_skip(name, "only root unmounts at once");
        return Ok(None);
    }
    let world = start_cluster(name)?;
    if let Some(world) = world.as_ref().filter(|_| !has_fd_passing) {
        fs::remove_file(world.cluster.directory().join("n1").join("handoff.sock"))?;
    }
    Ok(world)
}

/// The mount of `v` on a directory of its own.
struct HostMount {
    process: Child,
    mount_point: tempfile::TempDir,
}

impl HostMount {
    /// Mounts, by a program that is started with `bafs mount …` as its arguments, if there is one.
    fn start(world: &TestCluster, by: &[&str]) -> Result<Self> {
        let point = tempfile::tempdir()?;
        let bafs = world.bafs_command(&["mount", "v", &point.path().to_string_lossy()]);
        let mut words: Vec<OsString> = by.iter().map(OsString::from).collect();
        words.push(bafs.get_program().to_owned());
        words.extend(bafs.get_args().map(ToOwned::to_owned));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        for (name, value) in bafs.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let process = command.process_group(0).spawn()?;
        let shown = Self {
            process,
            mount_point: point,
        };
        ensure!(
            is_eventually(|| shown.is_mounted()),
            "the volume is not mounted"
        );
        Ok(shown)
    }

    fn is_mounted(&self) -> bool {
        !mounts_matching(&self.mount_point.path().to_string_lossy()).is_empty()
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(
            Pid::from_raw(i32::try_from(self.process.id())?),
            signal,
        )?)
    }

    /// The processes it has started.
    fn child_processes(&self) -> Result<Vec<i32>> {
        let id = self.process.id().to_string();
        let found = Command::new("pgrep").args(["-P", &id]).output()?;
        let found = String::from_utf8(found.stdout)?;
        found.lines().map(|id| Ok(id.trim().parse()?)).collect()
    }

    fn file_path(&self) -> PathBuf {
        self.mount_point.path().join("f")
    }
}

impl Drop for HostMount {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        is_eventually(|| !self.is_mounted());
    }
}

#[test]
fn mount_on_the_host_ends_cleanly_on_signals() -> Result<()> {
    let Some(world) = start_cluster("mount_on_the_host_ends_cleanly_on_signals")? else {
        return Ok(());
    };
    for asked in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut shown = HostMount::start(&world, &[])?;
        fs::write(shown.file_path(), asked.as_str())?;
        ensure!(fs::read(shown.file_path())? == asked.as_str().as_bytes());
        shown.signal(asked)?;
        let status = shown.process.wait()?;
        ensure!(status.success(), "it ends well at {asked}: {status}");
        ensure!(!shown.is_mounted(), "the mount is left after {asked}");
        ensure!(
            bafs_tests::is_gone_or_empty(shown.mount_point.path()),
            "the directory is as before"
        );
    }
    Ok(())
}

/// Ways to mount, and whether the node's door is open.
const MOUNT_METHODS: [(&str, &[&str], bool); 4] = [
    ("inline", &[], true),
    ("calls", &["--delegate=false"], false),
    ("early", &[], false),
    ("collected", &["--write-back"], false),
];

/// Mounts `v` on a directory, and waits until it is there.
fn mount_volume(world: &TestCluster, point: &Path, options: &[&str]) -> Result<Child> {
    let path = point.to_string_lossy();
    let mut command = world.bafs_command(&["mount", "v", &path]);
    let process = command.args(options).stderr(Stdio::piped()).spawn()?;
    ensure!(
        is_eventually(|| !mounts_matching(&path).is_empty()),
        "the volume is not mounted"
    );
    Ok(process)
}

#[test]
fn mount_ends_cleanly_before_its_successor() -> Result<()> {
    let name = "mount_ends_cleanly_before_its_successor";
    for (way, options, has_fd_passing) in MOUNT_METHODS {
        let Some(world) = start_cluster_with_path(name, has_fd_passing)? else {
            return Ok(());
        };
        let point = tempfile::tempdir()?;
        let mut shown = mount_volume(&world, point.path(), options)?;
        for turn in 0..4 {
            let text = format!("turn {turn}");
            fs::write(point.path().join("f"), &text)?;
            umount2(point.path(), MntFlags::empty())?;
            let next = mount_volume(&world, point.path(), options)?;
            let ended = std::mem::replace(&mut shown, next).wait_with_output()?;
            ensure!(ended.status.success(), "{way}: {}", printed_text(&ended));
            ensure!(
                !printed_text(&ended).contains("lost"),
                "{way}: {}",
                printed_text(&ended)
            );
            ensure!(
                fs::read(point.path().join("f"))? == text.as_bytes(),
                "{way}"
            );
        }
        umount2(point.path(), MntFlags::empty())?;
        ensure!(shown.wait()?.success());
    }
    Ok(())
}

#[test]
fn mount_waits_until_its_predecessor_has_ended() -> Result<()> {
    let name = "mount_waits_until_its_predecessor_has_ended";
    for (way, options, has_fd_passing) in MOUNT_METHODS {
        let Some(world) = start_cluster(name)? else {
            return Ok(());
        };
        if !has_fd_passing {
            fs::remove_file(world.cluster.directory().join("n1").join("handoff.sock"))?;
        }
        let point = tempfile::tempdir()?;
        let other = tempfile::tempdir()?;
        let shown = mount_volume(&world, point.path(), options)?;
        fs::write(point.path().join("f"), way)?;
        kill(Pid::from_raw(i32::try_from(shown.id())?), Signal::SIGTERM)?;
        let next = mount_volume(&world, other.path(), options)?;
        let ended = shown.wait_with_output()?;
        ensure!(ended.status.success(), "{way}: {}", printed_text(&ended));
        ensure!(fs::read(other.path().join("f"))? == way.as_bytes(), "{way}");
        kill(Pid::from_raw(i32::try_from(next.id())?), Signal::SIGTERM)?;
        let ended = next.wait_with_output()?;
        ensure!(ended.status.success(), "{way}: {}", printed_text(&ended));
    }
    Ok(())
}

#[test]
fn mount_with_an_open_file_is_busy() -> Result<()> {
    let name = "mount_with_an_open_file_is_busy";
    for (way, options, has_fd_passing) in MOUNT_METHODS {
        let Some(world) = start_cluster_with_path(name, has_fd_passing)? else {
            return Ok(());
        };
        let point = tempfile::tempdir()?;
        let shown = mount_volume(&world, point.path(), options)?;
        let mut open = fs::File::create(point.path().join("f"))?;
        ensure!(umount2(point.path(), MntFlags::empty()) == Err(Errno::EBUSY));
        open.write_all(way.as_bytes())?;
        drop(open);
        ensure!(fs::read(point.path().join("f"))? == way.as_bytes(), "{way}");
        umount2(point.path(), MntFlags::empty())?;
        let ended = shown.wait_with_output()?;
        ensure!(ended.status.success(), "{way}: {}", printed_text(&ended));
    }
    Ok(())
}

#[test]
fn mount_detached_serves_until_its_last_close() -> Result<()> {
    let name = "mount_detached_serves_until_its_last_close";
    for (way, options, has_fd_passing) in MOUNT_METHODS {
        let Some(world) = start_cluster_with_path(name, has_fd_passing)? else {
            return Ok(());
        };
        let point = tempfile::tempdir()?;
        let mut shown = mount_volume(&world, point.path(), options)?;
        let mut open = fs::File::create(point.path().join("f"))?;
        umount2(point.path(), MntFlags::MNT_DETACH)?;
        std::thread::sleep(Duration::from_millis(1_500));
        ensure!(shown.try_wait()?.is_none(), "{way}: a file is open");
        open.write_all(way.as_bytes())?;
        open.sync_all()?;
        drop(open);
        let next = mount_volume(&world, point.path(), options)?;
        let ended = shown.wait_with_output()?;
        ensure!(ended.status.success(), "{way}: {}", printed_text(&ended));
        ensure!(fs::read(point.path().join("f"))? == way.as_bytes(), "{way}");
        umount2(point.path(), MntFlags::empty())?;
        let ended = next.wait_with_output()?;
        ensure!(ended.status.success(), "{way}: {}", printed_text(&ended));
    }
    Ok(())
}

#[test]
fn mounts_of_one_volume_end_together() -> Result<()> {
    let name = "mounts_of_one_volume_end_together";
    for (way, options, has_fd_passing) in MOUNT_METHODS {
        let Some(world) = start_cluster_with_path(name, has_fd_passing)? else {
            return Ok(());
        };
        let (point, other) = (tempfile::tempdir()?, tempfile::tempdir()?);
        let writer = mount_volume(&world, point.path(), options)?;
        fs::write(point.path().join("f"), way)?;
        let reader = mount_volume(&world, other.path(), &["--read-only"])?;
        ensure!(fs::read(other.path().join("f"))? == way.as_bytes(), "{way}");
        umount2(point.path(), MntFlags::empty())?;
        umount2(other.path(), MntFlags::empty())?;
        for process in [writer, reader] {
            let ended = process.wait_with_output()?;
            ensure!(ended.status.success(), "{way}: {}", printed_text(&ended));
        }
    }
    Ok(())
}

#[test]
fn mount_with_open_files_is_still_fenced() -> Result<()> {
    let name = "mount_with_open_files_is_still_fenced";
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    let (point, other) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let shown = mount_volume(&world, point.path(), &[])?;
    let open = fs::File::create(point.path().join("f"))?;
    let next = mount_volume(&world, other.path(), &[])?;
    let ended = shown.wait_with_output()?;
    ensure!(ended.status.code() == Some(75), "{}", printed_text(&ended));
    ensure!(
        printed_text(&ended).contains("another agent writes"),
        "{}",
        printed_text(&ended)
    );
    drop(open);
    kill(Pid::from_raw(i32::try_from(next.id())?), Signal::SIGTERM)?;
    ensure!(next.wait_with_output()?.status.success());
    Ok(())
}

#[test]
fn mount_on_the_host_can_outlive_its_terminal() -> Result<()> {
    let Some(world) = start_cluster("mount_on_the_host_can_outlive_its_terminal")? else {
        return Ok(());
    };
    let mut shown = HostMount::start(&world, &["nohup"])?;
    shown.signal(Signal::SIGHUP)?;
    // A signal that counted would be seen before the next one.
    for turn in 0..20 {
        fs::write(shown.file_path(), turn.to_string())?;
        std::thread::sleep(Duration::from_millis(50));
    }
    ensure!(shown.process.try_wait()?.is_none() && shown.is_mounted());
    shown.signal(Signal::SIGTERM)?;
    ensure!(shown.process.wait()?.success());
    Ok(())
}

#[test]
fn mount_on_the_host_ends_with_its_process() -> Result<()> {
    let name = "mount_on_the_host_ends_with_its_process";
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    if !Path::new("/usr/bin/fusermount3").exists() {
        report_skip(name, "there is no fusermount3 to clean up");
        return Ok(());
    }
    let mut shown = HostMount::start(&world, &[])?;
    shown.process.kill()?;
    shown.process.wait()?;
    ensure!(
        is_eventually(|| !shown.is_mounted()),
        "a dead mount is left"
    );
    Ok(())
}

#[test]
fn mount_is_removed_when_its_connection_is_aborted() -> Result<()> {
    let name = "mount_is_removed_when_its_connection_is_aborted";
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    if !nix::unistd::geteuid().is_root() {
        report_skip(name, "only root may abort a connection");
        return Ok(());
    }
    let mut shown = HostMount::start(&world, &[])?;
    let minor = nix::sys::stat::minor(fs::metadata(shown.mount_point.path())?.dev());
    let control = tempfile::tempdir()?;
    let at = control.path().to_string_lossy().into_owned();
    let mount = ["-t", "fusectl", "fusectl", &at];
    ensure!(Command::new("mount").args(mount).status()?.success());
    let aborted = fs::write(control.path().join(minor.to_string()).join("abort"), "1");
    ensure!(Command::new("umount").arg(&at).status()?.success());
    aborted.context("the connection is there")?;
    let status = shown.process.wait()?;
    ensure!(status.code() == Some(75), "it tells of it: {status}");
    ensure!(!shown.is_mounted(), "a dead mount is left");
    Ok(())
}

#[test]
fn mount_watchdog_is_replaced_when_killed() -> Result<()> {
    let name = "mount_watchdog_is_replaced_when_killed";
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    let mut shown = HostMount::start(&world, &[])?;
    fs::write(shown.file_path(), b"before")?;
    let first = shown.child_processes()?;
    for keeper in &first {
        kill(Pid::from_raw(*keeper), Signal::SIGKILL)?;
    }
    ensure!(!first.is_empty(), "nobody keeps the mount");
    let is_new = |id: &i32| !first.contains(id);
    let renewed = || {
        shown
            .child_processes()
            .is_ok_and(|ids| ids.iter().any(is_new))
    };
    ensure!(is_eventually(renewed), "no other keeper has come");
    ensure!(fs::read(shown.file_path()).context("the mount goes on")? == b"before");
    // The file is held, so that only the keeper can end the connection.
    let held = fs::File::open(shown.file_path())?;
    std::thread::sleep(Duration::from_millis(500));
    shown.process.kill()?;
    shown.process.wait()?;
    ensure!(
        is_eventually(|| !shown.is_mounted()),
        "a dead mount is left"
    );
    drop(held);
    Ok(())
}

fn is_eventually(holds: impl Fn() -> bool) -> bool {
    for _ in 0..200 {
        if holds() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    false
}
