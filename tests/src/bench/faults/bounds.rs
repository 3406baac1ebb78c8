//! Faults of resource limits: memory, descriptors, processors, files.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::identity::Identity;
use bafs_proto::message::Role;
use bafs_proto::token::{Resource, Right};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::results::set_mode;
use super::runs::run_checked;
use super::user_directory::{UserDirectory, last_lines, wait_or_kill};
use crate::bench::measure::{Stopwatch, time_of_day};
use crate::{TestCluster, bafs_program, mounts_matching, printed_text};

/// Memory limit of an agent, in MiB, however many volumes its job has.
pub(super) const AGENT_MIB_MAX: u64 = 256 + 64;

/// The most memory that the agent of a job with so many volumes ever had, in MiB.
pub(super) fn measure_agent_mib(volumes: u32) -> Result<u64> {
    let world = TestCluster::start(&["2GB"])?;
    world.wait_for_servers(2)?;
    let text = format!(
        "for i in 1..{volumes}\nvolume v$(i) scratch 64 KB files 4\nmount v$(i) a /in/$(i)\nend\n\
         volume r scratch 1 MB\njob a {{\nexecutable = sh\n\
         arguments = -c 'for i in /in/*; do echo x > $i/x; done; \
         cat /in/*/x | wc -l > /r/x; sleep 2'\n}}\nmount r a /r\nextract r x bafs://home/x\n"
    );
    let path = world.write_workflow(&text)?;
    let told = world.home.path().join("told");
    let mut command = world.bafs_command(&["run"]);
    command
        .arg(&path)
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&told)?);
    let mut run = command.spawn()?;
    let agent = format!("agent --identity {}", world.cluster.identity().display());
    let watch = Stopwatch::start();
    let mut most_kib = 0;
    let ended = loop {
        for line in crate::processes_matching(&agent) {
            let pid = line.split(' ').next().unwrap_or_default();
            most_kib = most_kib.max(read_anonymous_kib(pid).unwrap_or(0));
        }
        if let Some(status) = run.try_wait()? {
            break status;
        }
        if watch.elapsed() > Duration::from_secs(240) {
            run.kill()?;
            break run.wait()?;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let told = last_lines(&std::fs::read_to_string(&told)?);
    ensure!(ended.success(), "the run ends with {ended}: {told}");
    let found = world.read_home("x")?;
    let found = String::from_utf8_lossy(&found);
    ensure!(
        found.trim() == volumes.to_string(),
        "{} volumes were written",
        found.trim()
    );
    ensure!(most_kib > 0, "no agent was seen");
    Ok(most_kib / 1024)
}

/// Memory of a process, without the program itself and other files.
fn read_anonymous_kib(pid: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let now = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    now.trim().trim_end_matches(" kB").parse().ok()
}

pub(super) fn check_memory_of_many_volumes() -> Result<()> {
    let mib = measure_agent_mib(100)?;
    ensure!(mib <= AGENT_MIB_MAX, "{mib} MiB with 100 volumes");
    Ok(())
}

/// A token to which its bearer appended many blocks is refused.
pub(super) fn check_token_of_many_blocks() -> Result<()> {
    const BLOCKS: usize = 24;
    let world = TestCluster::start(&["100MB"])?;
    world.wait_for_servers(2)?;
    run_checked(
        &world,
        &["volume", "create", "v", "--node", "n1", "--size", "5MB"],
    )?;
    let directory = tempfile::tempdir()?;
    let granted = directory.path().join("granted");
    run_checked(&world, &["grant", "v", "--to", &granted.to_string_lossy()])?;
    let list = |identity: &std::path::Path| {
        let mut command = world.bafs_command(&["exec", "--mount", "v:/s", "--", "true"]);
        command.env("BAFS_IDENTITY", identity);
        Ok::<_, anyhow::Error>(command.output()?)
    };
    let fine = list(&granted)?;
    ensure!(
        fine.status.success(),
        "the token as granted: {}",
        printed_text(&fine)
    );
    let mut identity = Identity::load(&granted.join("agent"), Role::Agent)?;
    for _ in 0..BLOCKS {
        let expires = time_of_day().plus_ms(3_600_000);
        let rights = [Right::Read, Right::Write, Right::Manage];
        let longer =
            identity
                .verifier
                .narrow(&identity.token, &[Resource::Cluster], &rights, expires);
        // A machine whose appends cannot reach the limit need not reject them.
        let Ok(token) = longer else { return Ok(()) };
        identity.token = token;
    }
    let bomb = directory.path().join("bomb");
    std::fs::create_dir(&bomb)?;
    identity.save(&bomb.join("agent"))?;
    let refused = list(&bomb)?;
    ensure!(
        !refused.status.success(),
        "{BLOCKS} more blocks are evaluated"
    );
    Ok(())
}

/// A store that another user made beforehand is rejected, and so is one with links in it.
pub(super) fn check_store_of_another_user() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let identity = directory.path().join("identity");
    let made = Command::new(bafs_program())
        .arg("init")
        .arg(&identity)
        .output()?;
    ensure!(made.status.success(), printed_text(&made));
    let mine = directory.path().join("mine");
    std::fs::create_dir(&mine)?;
    for (name, owner) in [("theirs", 65_534), ("linked", 0)] {
        let store = directory.path().join(name);
        std::fs::create_dir(&store)?;
        set_mode(&store, 0o777)?;
        std::os::unix::fs::symlink(&mine, store.join("volumes"))?;
        std::os::unix::fs::chown(&store, Some(owner), Some(owner))?;
        let mut command = Command::new(bafs_program());
        command
            .arg("node")
            .arg("--identity")
            .arg(&identity)
            .arg("--store")
            .arg(&store);
        command.args(["--size", "100MB", "--slots", "1", "--until-stdin-closes"]);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut node = command.spawn()?;
        std::thread::sleep(Duration::from_secs(2));
        let is_there = node.try_wait()?.is_none();
        drop(node.stdin.take());
        wait_or_kill(&mut node, Duration::from_secs(10))?;
        ensure!(!is_there, "the node takes the store '{name}'");
        let mut told = String::new();
        node.stderr
            .take()
            .context("piped")?
            .read_to_string(&mut told)?;
        ensure!(
            told.contains(name),
            "the store '{name}' is not named: {told}"
        );
    }
    Ok(())
}

/// Journals, which hold the jobs' environment, are for their owner alone.
pub(super) fn check_journal_permissions() -> Result<()> {
    let directory = UserDirectory::new()?;
    let text = "volume w scratch 1 MB\njob j {\nexecutable = true\nenvironment = APIKEY=secret\n}\n\
        mount w j /w\n";
    directory
        .run_workflow(text, &["--local", "1"])?
        .check_code(0)?;
    let mode = std::fs::metadata(directory.path("journal"))?
        .permissions()
        .mode()
        & 0o777;
    ensure!(mode & 0o077 == 0, "the journal has the mode {mode:o}");
    Ok(())
}

/// A mount that is unmounted in order ends with 0 also where the volume is mounted again at once.
pub(super) fn check_immediate_remount() -> Result<()> {
    let world = TestCluster::start(&["100MB"])?;
    world.wait_for_servers(2)?;
    run_checked(
        &world,
        &["volume", "create", "v", "--node", "n1", "--size", "5MB"],
    )?;
    let place = tempfile::tempdir()?;
    let path = place.path().to_string_lossy().into_owned();
    let mount = || -> Result<_> {
        let mut command = world.bafs_command(&["mount", "v", &path]);
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        for _ in 0..200 {
            if !mounts_matching(&path).is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(child)
    };
    let umount = || Command::new("umount").arg(&path).status();
    let mut first = mount()?;
    std::fs::write(place.path().join("f"), "hello\n")?;
    ensure!(umount()?.success(), "umount fails");
    let mut second = mount()?;
    let ended = wait_or_kill(&mut first, Duration::from_secs(20))?;
    let found = std::fs::read_to_string(place.path().join("f"));
    umount()?;
    if wait_or_kill(&mut second, Duration::from_secs(20))?.is_none() {
        Command::new("umount").args(["-l", &path]).status()?;
    }
    ensure!(
        found.is_ok_and(|found| found == "hello\n"),
        "the file is not as it was"
    );
    ensure!(
        ended == Some(Some(0)),
        "the first mount ends with {ended:?}"
    );
    Ok(())
}

/// The process of this name opens files of a directory up to its limit, prints their number and the
/// error, and keeps them open until its input ends.
pub(in crate::bench) const HOLD_PROCESS: &str = "hold-descriptors";

/// See [`HOLD_PROCESS`].
#[allow(clippy::print_stdout, reason = "who started it reads that")]
pub(in crate::bench) fn run_hold_process(arguments: &[String]) -> Result<()> {
    let directory = arguments.first().context("a directory")?;
    let mut held = Vec::new();
    let error = loop {
        match std::fs::File::create(format!("{directory}/{}", held.len())) {
            Ok(file) => held.push(file),
            Err(error) => break error,
        }
    };
    println!("{} {}", held.len(), error.raw_os_error().unwrap_or(0));
    let mut rest = [0; 1];
    // It ends when the other end is closed.
    nix::unistd::read(std::io::stdin().as_fd(), &mut rest)?;
    Ok(())
}

/// A program that opens very many files gets EMFILE itself, and takes none from the other jobs.
pub(super) fn check_descriptor_limit() -> Result<()> {
    const EMFILE: &str = "24";
    let directory = tempfile::tempdir()?;
    let few = directory.path().join("bafs-with-few-descriptors");
    let script = format!(
        "#!/bin/sh\nulimit -n 3000\nexec {} \"$@\"\n",
        bafs_program().display()
    );
    std::fs::write(&few, script)?;
    set_mode(&few, 0o755)?;
    let world = TestCluster::start_with_spec(&["100MB"], |spec| spec.program = few)?;
    world.wait_for_servers(2)?;
    for name in ["v", "w"] {
        let create = ["volume", "create", name, "--node", "n1", "--size", "20MB"];
        run_checked(&world, &create)?;
    }
    // Over the network, where the node holds the open files.
    std::fs::remove_file(world.cluster.directory().join("n1").join("handoff.sock"))?;
    let own = std::env::current_exe()?;
    let own = own.to_string_lossy();
    let exec = ["exec", "--mount", "v:/s", "--", &own, HOLD_PROCESS, "/s"];
    let mut command = world.bafs_command(&exec);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut hold = command.spawn()?;
    let mut line = String::new();
    let stdout = hold.stdout.take().context("piped")?;
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line)?;
    let make = "cd /w && for i in $(seq 40); do echo $i > f$i || exit 9; done";
    let other = world
        .bafs_command(&["exec", "--mount", "w:/w", "--", "sh", "-c", make])
        .output();
    drop(hold.stdin.take());
    if wait_or_kill(&mut hold, Duration::from_secs(20))?.is_none() {
        kill(Pid::from_raw(i32::try_from(hold.id())?), Signal::SIGKILL).ok();
    }
    let other = other?;
    ensure!(
        other.status.success(),
        "another program: {}",
        last_lines(&printed_text(&other))
    );
    let error = line.split_whitespace().nth(1).unwrap_or_default();
    ensure!(
        error == EMFILE,
        "open files and error number of the program: {line:?}"
    );
    Ok(())
}
