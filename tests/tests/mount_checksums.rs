//! What is written by one path is read by every other: the same files, to the byte. Paths are the
//! directory itself, the agent that has it (asked by the device and by rings), the kernel that
//! reads large files by itself, calls over TCP and QUIC, the volume API, caches and remote I/O.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::fd_passing::HANDOFF_SOCKET_NAME;
use bafs_proto::message::{JobOutcome, MountTarget};
use bafs_tests::api::BlockingClient;
use bafs_tests::mounted_volume::{RING_MESSAGE, WRITE_BACK_MESSAGE};
use bafs_tests::uring::{self, RingSetting};
use bafs_tests::{
    TestCluster, mount_obstacle, mounts_matching, passthrough_obstacle, printed_text, report_skip,
};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const TEST_NAME: &str = "mount_paths_read_each_others_writes_exactly";

/// The volume that all ways to write go over, one after the other.
const SHARED_VOLUME: &str = "turns";

/// Writes files below a directory, by a seed, in the ways that programs do.
const WRITE_SCRIPT: &str = include_str!("checksums/write.py");

/// Tells names, sizes and digests of all files below some directories.
const LIST_SCRIPT: &str = include_str!("checksums/look.py");

/// From a program to a volume's bytes.
#[derive(Debug, Clone, Copy)]
struct AccessPath {
    name: &'static str,
    method: MountMethod,
    /// Options of the command, and what it then says that it does.
    options: &'static [&'static str],
    messages: &'static [&'static str],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MountMethod {
    /// To a job of the volume's node: the directory itself.
    JobDirectory,
    /// By a mount of the host, whose agent has the directory.
    HostMount,
    /// The same, by rings.
    HostMountWithRings,
    /// To a job that might be anywhere: the node's door is shut.
    RemoteJob,
    /// The same, and the kernel collects writes.
    RemoteJobWithWriteBack,
}

const BIND_MOUNT: AccessPath = AccessPath {
    name: "directory",
    method: MountMethod::JobDirectory,
    options: &[],
    messages: &["directory: the job uses the server's local directory itself"],
};

const INLINE: AccessPath = AccessPath {
    name: "inline",
    method: MountMethod::HostMount,
    options: &[],
    messages: &[
        "inline: this process runs each operation",
        "through /dev/fuse",
    ],
};

const RING: AccessPath = AccessPath {
    name: "ring",
    method: MountMethod::HostMountWithRings,
    options: &[],
    messages: &["inline: this process runs each operation", RING_MESSAGE],
};

/// A mount that is only read passes large files to the kernel.
const PASSTHROUGH: AccessPath = AccessPath {
    name: "passthrough",
    method: MountMethod::HostMount,
    options: &["--read-only"],
    messages: &["inline: ", "the kernel reads"],
};

const TCP: AccessPath = AccessPath {
    name: "tcp",
    method: MountMethod::RemoteJob,
    options: &["--channel", "tcp"],
    messages: &["return early", "over TCP"],
};

const CALLS: AccessPath = AccessPath {
    name: "asked",
    method: MountMethod::RemoteJob,
    options: &["--channel", "tcp", "--delegate", "false"],
    messages: &["each operation is a call", "over TCP"],
};

const QUIC: AccessPath = AccessPath {
    name: "quic",
    method: MountMethod::RemoteJob,
    options: &["--channel", "quic"],
    messages: &["return early", "over QUIC"],
};

/// The kernel collects writes.
const WRITE_BACK: AccessPath = AccessPath {
    name: "collected",
    method: MountMethod::HostMount,
    options: &["--write-back"],
    messages: &[
        "inline: this process runs each operation",
        WRITE_BACK_MESSAGE,
    ],
};

const WRITE_BACK_TCP: AccessPath = AccessPath {
    name: "collected-tcp",
    method: MountMethod::RemoteJobWithWriteBack,
    options: &["--channel", "tcp"],
    messages: &[WRITE_BACK_MESSAGE, "return early", "over TCP"],
};

/// Ways to write that this machine has; says aloud which it has not.
fn write_paths() -> Vec<AccessPath> {
    let mut ways = vec![
        BIND_MOUNT,
        INLINE,
        TCP,
        CALLS,
        QUIC,
        WRITE_BACK,
        WRITE_BACK_TCP,
    ];
    if uring::can_use_rings(&format!("{TEST_NAME}, by rings")) {
        ways.push(RING);
    }
    ways
}

/// Ways to read, likewise.
fn read_paths() -> Result<Vec<AccessPath>> {
    let mut ways = write_paths();
    // Where nothing is written, nothing is collected.
    ways.retain(|way| !way.messages.contains(&WRITE_BACK_MESSAGE));
    match passthrough_obstacle(tempfile::tempdir()?.path()) {
        Some(reason) => report_skip(&format!("{TEST_NAME}, by passthrough"), reason),
        None => ways.push(PASSTHROUGH),
    }
    Ok(ways)
}

/// Directories by which a program comes to volumes, in their order.
struct MountedDirectories {
    mounts: Vec<(PathBuf, Child)>,
    /// Dropped last: what is removed with it must not be mounted any more.
    root: tempfile::TempDir,
}

impl MountedDirectories {
    fn mount(world: &TestCluster, way: AccessPath, volumes: &[String]) -> Result<Self> {
        let mut places = Self {
            mounts: Vec::new(),
            root: tempfile::tempdir()?,
        };
        for (number, volume) in volumes.iter().enumerate() {
            let at = places.root.path().join(number.to_string());
            fs::create_dir(&at)?;
            let path = at.to_str().context("a temporary path is text")?;
            let args = [&["mount", "--explain", volume, path], way.options].concat();
            let agent = world.bafs_command(&args).stderr(Stdio::piped()).spawn()?;
            places.mounts.push((at.clone(), agent));
            let is_there = |_| {
                std::thread::sleep(Duration::from_millis(20));
                !mounts_matching(path).is_empty()
            };
            ensure!((0..400).any(is_there), "{}: no mount at {path}", way.name);
        }
        Ok(places)
    }

    /// Ends all mounts, and only then looks at what their agents said.
    fn unmount(mut self, way: AccessPath) -> Result<()> {
        let mounts = std::mem::take(&mut self.mounts);
        let ended = mounts
            .into_iter()
            .map(|(at, agent)| (at, stop_agent(agent)));
        let ended: Vec<_> = ended.collect();
        for (at, output) in ended {
            let checked = output.and_then(|output| check_access_path(way, &output));
            checked.with_context(|| at.display().to_string())?;
        }
        Ok(())
    }
}

/// After a check that failed: to remove the directories would else remove what the volumes hold, or
/// wait for a cluster that is gone.
impl Drop for MountedDirectories {
    fn drop(&mut self) {
        for (at, agent) in std::mem::take(&mut self.mounts) {
            match stop_agent(agent) {
                Ok(output) => eprintln!("{}: {}", at.display(), printed_text(&output)),
                Err(error) => eprintln!("{}: {error:#}", at.display()),
            }
            // In case that the agent could not.
            let _ = umount2(&at, MntFlags::MNT_DETACH);
        }
    }
}

/// Ends a mount's agent in order.
fn stop_agent(agent: Child) -> Result<Output> {
    kill(Pid::from_raw(i32::try_from(agent.id())?), Signal::SIGTERM)?;
    Ok(agent.wait_with_output()?)
}

fn check_access_path(way: AccessPath, output: &Output) -> Result<()> {
    let text = printed_text(output);
    ensure!(output.status.success(), "{}: {text}", way.name);
    let missing = way.messages.iter().find(|word| !text.contains(**word));
    ensure!(missing.is_none(), "{}: {missing:?}: {text}", way.name);
    Ok(())
}

/// The door of a node while it is shut; it is open again when this is dropped.
struct DisabledFdPassing(PathBuf);

impl DisabledFdPassing {
    fn new(world: &TestCluster) -> Result<Self> {
        let handoff = world
            .cluster
            .directory()
            .join("n1")
            .join(HANDOFF_SOCKET_NAME);
        fs::rename(&handoff, handoff.with_extension("away"))?;
        Ok(Self(handoff))
    }
}

impl Drop for DisabledFdPassing {
    fn drop(&mut self) {
        if let Err(error) = fs::rename(self.0.with_extension("away"), &self.0) {
            eprintln!("{} stays shut: {error}", self.0.display());
        }
    }
}

/// Runs a Python program that is given the directories of some volumes and then `last`; returns
/// what it printed.
fn run_on_volumes(
    world: &TestCluster,
    way: AccessPath,
    volumes: &[String],
    (program, last): (&str, &str),
) -> Result<String> {
    let output = match way.method {
        MountMethod::JobDirectory => run_job(world, way, volumes, (program, last))?,
        MountMethod::RemoteJob | MountMethod::RemoteJobWithWriteBack => {
            let _shut = DisabledFdPassing::new(world)?;
            run_job(world, way, volumes, (program, last))?
        }
        MountMethod::HostMount | MountMethod::HostMountWithRings => {
            let rings = match way.method {
                MountMethod::HostMountWithRings => Some(RingSetting::enable()?),
                _ if uring::uring_obstacle().is_none() => Some(RingSetting::disable()?),
                _ => None,
            };
            let places = MountedDirectories::mount(world, way, volumes)?;
            drop(rings);
            let directories = places.mounts.iter().map(|(at, _)| at.clone()).collect();
            let output = run_python(directories, (program, last));
            places.unmount(way)?;
            output?
        }
    };
    ensure!(
        output.status.success(),
        "{}: {}",
        way.name,
        printed_text(&output)
    );
    Ok(String::from_utf8(output.stdout)?)
}

fn run_job(
    world: &TestCluster,
    way: AccessPath,
    volumes: &[String],
    (program, last): (&str, &str),
) -> Result<Output> {
    let places: Vec<_> = (0..volumes.len()).map(|it| format!("/v{it}")).collect();
    let mount = |(volume, place)| {
        let access = match (last.is_empty(), way.method) {
            (true, _) => "ro",
            (false, MountMethod::RemoteJobWithWriteBack) => "write-back",
            (false, _) => "rw",
        };
        format!("{volume}:{place}:{access}")
    };
    let mounts: Vec<_> = volumes.iter().zip(&places).map(mount).collect();
    let mut args = vec!["exec", "--explain"];
    args.extend(way.options);
    args.extend(mounts.iter().flat_map(|mount| ["--mount", mount]));
    args.extend(["--", "python3", "-c", program]);
    args.extend(places.iter().map(String::as_str));
    args.extend([last].into_iter().filter(|last| !last.is_empty()));
    let output = world.bafs_command(&args).output()?;
    // A job that only reads is not answered early.
    let reads = AccessPath {
        messages: way.messages.last().map_or(&[], std::slice::from_ref),
        ..way
    };
    check_access_path(if last.is_empty() { reads } else { way }, &output)?;
    Ok(output)
}

fn run_python(directories: Vec<PathBuf>, (program, last): (&str, &str)) -> Result<Output> {
    let mut command = Command::new("python3");
    command.args(["-c", program]).args(directories);
    command.args([last].iter().filter(|last| !last.is_empty()));
    Ok(command.output()?)
}

/// Lines of what was found, whatever their order.
fn unordered_lines(found: &str) -> BTreeSet<&str> {
    found.lines().collect()
}

fn check_equal(name: &str, found: &str, expected: &str) -> Result<()> {
    let (found, expected) = (unordered_lines(found), unordered_lines(expected));
    let differ: Vec<_> = found.symmetric_difference(&expected).collect();
    ensure!(differ.is_empty(), "read by {name}: {differ:#?}");
    Ok(())
}

fn create_volume(world: &TestCluster, name: &str, more: &[&str]) -> Result<()> {
    let create = ["volume", "create", name, "--node", "n1", "--size", "100MB"];
    world.run_json(&[&create[..], &["--limit", "watched"], more].concat())?;
    Ok(())
}

/// Volumes, each written by one way, one by all in turn and one by the volume API; with plain
/// directories that are the same.
struct WrittenVolumes {
    volumes: Vec<String>,
    plain_directory: tempfile::TempDir,
}

impl WrittenVolumes {
    fn new(world: &TestCluster, ways: &[AccessPath]) -> Result<Self> {
        let mut written = Self {
            volumes: Vec::new(),
            plain_directory: tempfile::tempdir()?,
        };
        for (number, way) in ways.iter().enumerate() {
            let (volume, seed) = (way.name.to_owned(), number.to_string());
            create_volume(world, &volume, &[])?;
            run_on_volumes(
                world,
                *way,
                std::slice::from_ref(&volume),
                (WRITE_SCRIPT, &seed),
            )?;
            written.write_plain(&volume, &seed)?;
            written.volumes.push(volume);
        }
        // Each goes over what the one before has left.
        let turns = SHARED_VOLUME.to_owned();
        create_volume(world, &turns, &[])?;
        for (number, way) in ways.iter().rev().enumerate() {
            let seed = (100 + number).to_string();
            run_on_volumes(
                world,
                *way,
                std::slice::from_ref(&turns),
                (WRITE_SCRIPT, &seed),
            )?;
            written.write_plain(&turns, &seed)?;
        }
        written.volumes.push(turns);
        let filled = "filled".to_owned();
        written.write_plain(&filled, "200")?;
        let home = world.home.path().join("in");
        fs::create_dir(&home)?;
        let output = run_python(vec![home], (WRITE_SCRIPT, "200"))?;
        ensure!(output.status.success(), printed_text(&output));
        create_volume(world, &filled, &["--from", "bafs://home/in"])?;
        written.volumes.push(filled);
        Ok(written)
    }

    fn write_plain(&self, volume: &str, seed: &str) -> Result<()> {
        let at = self.plain_directory.path().join(volume);
        fs::create_dir_all(&at)?;
        let output = run_python(vec![at], (WRITE_SCRIPT, seed))?;
        ensure!(output.status.success(), printed_text(&output));
        Ok(())
    }

    /// What must be found in the volumes.
    fn expected(&self) -> Result<String> {
        let plain = |volume: &String| self.plain_directory.path().join(volume);
        list_files(self.volumes.iter().map(plain).collect())
    }
}

/// What is in directories of this host.
fn list_files(directories: Vec<PathBuf>) -> Result<String> {
    let output = run_python(directories, (LIST_SCRIPT, ""))?;
    ensure!(output.status.success(), printed_text(&output));
    Ok(String::from_utf8(output.stdout)?)
}

/// Copies all volumes to another node, and looks at them there.
fn list_copies(world: &TestCluster, volumes: &[String]) -> Result<String> {
    let mut copies = Vec::new();
    for volume in volumes {
        let copy = world.run_json(&["volume", "replicate", volume, "--to", "n2"])?;
        copies.push(copy["id"].as_str().context("an id")?.to_owned());
    }
    let found = run_on_volumes(world, BIND_MOUNT, &copies, (LIST_SCRIPT, ""))?;
    for copy in &copies {
        world.run_json(&["volume", "delete", copy])?;
    }
    Ok(found)
}

/// Brings all files of a volume home, and returns the directory where they are now.
fn extract_files(world: &TestCluster, written: &WrittenVolumes, volume: &str) -> Result<PathBuf> {
    for path in files_below(&written.plain_directory.path().join(volume))? {
        let path = path.to_str().context("a name is text")?;
        let target = format!("bafs://home/out/{path}");
        world.run_json(&["volume", "extract", volume, path, &target])?;
    }
    Ok(world.home.path().join("out"))
}

fn files_below(root: &Path) -> Result<Vec<PathBuf>> {
    let (mut found, mut directories) = (Vec::new(), vec![root.to_owned()]);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            match path.is_dir() {
                true => directories.push(path),
                false => found.push(path.strip_prefix(root)?.to_owned()),
            }
        }
    }
    Ok(found)
}

/// Makes a cache volume of a directory of home.
fn create_cache(world: &TestCluster, name: &str, node: &str, path: &str) -> Result<()> {
    let create = ["volume", "create", name, "--node", node, "--size", "100MB"];
    let source = format!("bafs://home/{path}");
    world.run_json(&[&create[..], &["--cache", &source]].concat())?;
    Ok(())
}

/// Looks at the files of a cache volume in a job, which must reach it in this way.
fn list_cache_files(world: &TestCluster, name: &str, says: &str) -> Result<String> {
    let mount = format!("{name}:/cache:ro");
    let args = ["exec", "--explain", "--mount", &mount, "--", "python3"];
    let args = [&args[..], &["-c", LIST_SCRIPT, "/cache"]].concat();
    let output = world.bafs_command(&args).output()?;
    ensure!(output.status.success(), printed_text(&output));
    ensure!(
        printed_text(&output).contains(says),
        "{says}: {}",
        printed_text(&output)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// Caches of what was brought home: filled from home and from a peer, through the network, and
/// read by the kernel itself.
fn check_caches(world: &TestCluster, expected: &str) -> Result<()> {
    let on_this_machine = "the agent reads local blocks directly";
    create_cache(world, "far", "n2", "out")?;
    let found = list_cache_files(world, "far", on_this_machine)?;
    check_equal("a cache volume", &found, expected)?;
    create_cache(world, "near", "n1", "out")?;
    {
        let _shut = DisabledFdPassing::new(world)?;
        let found = list_cache_files(world, "near", "blocks come through the network")?;
        check_equal("a cache volume, through the network", &found, expected)?;
    }
    let found = list_cache_files(world, "near", on_this_machine)?;
    check_equal("a cache volume that a peer filled", &found, expected)?;
    // Only where files are large does the kernel read them by itself.
    let (out, large) = (
        world.home.path().join("out"),
        world.home.path().join("large"),
    );
    fs::create_dir(&large)?;
    for name in ["sequential", "scattered", "sparse", "mapped", "replaced"] {
        fs::copy(out.join(name), large.join(name))?;
    }
    let expected = list_files(vec![large])?;
    create_cache(world, "whole", "n2", "large")?;
    for turn in ["while it comes", "when it is here"] {
        let found = list_cache_files(world, "whole", "the kernel reads")?;
        check_equal(
            &format!("a cache of large files, {turn}"),
            &found,
            &expected,
        )?;
    }
    Ok(())
}

/// Runs a program in a job that works on a directory of home itself.
fn run_on_home(world: &TestCluster, path: &str, (program, last): (&str, &str)) -> Result<String> {
    let api = BlockingClient::new(&world.cluster.identity())?;
    let programs = tempfile::tempdir()?;
    let place = programs.path().join("program.py");
    fs::write(&place, program)?;
    let script = format!("python3 {} /data {last}", place.display());
    let target = MountTarget::Home {
        server: world.cluster.home_address().to_owned(),
        path: path.to_owned(),
    };
    let (api_client, node) = (api.client(), world.cluster.address("n1"));
    let report = api.block_on(async {
        let start = api_client.start_job_with(node, target, &script, |job| {
            job.mounts[0].writable = !last.is_empty();
        });
        api_client.wait_for_job(node, start.await?).await
    })?;
    ensure!(report.outcome == JobOutcome::Exited(0), "{report:?}");
    Ok(report.output_tail)
}

/// Remote I/O: what it writes is at home, and what is at home it reads.
fn check_remote_io(world: &TestCluster, written: &WrittenVolumes, expected: &str) -> Result<()> {
    let found = run_on_home(world, "out", (LIST_SCRIPT, ""))?;
    check_equal("remote I/O", &found, expected)?;
    let seed = "300";
    run_on_home(world, "direct", (WRITE_SCRIPT, seed))?;
    written.write_plain("direct", seed)?;
    let roots = [world.home.path(), written.plain_directory.path()];
    let [found, expected] = roots.map(|root| list_files(vec![root.join("direct")]));
    check_equal("what remote I/O has written", &found?, &expected?)
}

#[test]
fn mount_paths_read_each_others_writes_exactly() -> Result<()> {
    let no_python = Command::new("python3").arg("-V").output().is_err();
    let missing = mount_obstacle().or_else(|| no_python.then(|| "no python3".to_owned()));
    if let Some(reason) = missing {
        report_skip(TEST_NAME, &reason);
        return Ok(());
    }
    let world = TestCluster::start(&["8GB", "8GB"])?;
    world.wait_for_servers(3)?;
    let written = WrittenVolumes::new(&world, &write_paths())?;
    let expected = written.expected()?;
    // Each volume has its files, so nothing is compared with nothing.
    ensure!(
        expected.lines().count() >= written.volumes.len() * 12,
        "{expected}"
    );
    for way in read_paths()? {
        let found = run_on_volumes(&world, way, &written.volumes, (LIST_SCRIPT, ""))?;
        check_equal(way.name, &found, &expected)?;
    }
    let found = list_copies(&world, &written.volumes)?;
    check_equal("a copy on another node", &found, &expected)?;
    // What all ways have written goes the rest of the way.
    let expected = list_files(vec![written.plain_directory.path().join(SHARED_VOLUME)])?;
    let home = extract_files(&world, &written, SHARED_VOLUME)?;
    check_equal("extraction", &list_files(vec![home])?, &expected)?;
    check_caches(&world, &expected)?;
    check_remote_io(&world, &written, &expected)
}
