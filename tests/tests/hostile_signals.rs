//! Signals at many moments of a run on a throw-away cluster, and stuck or killed parts of a
//! lasting one: nothing hangs, and nothing is left behind.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bafs_tests::exec_job::{job_command, start_cluster};
use bafs_tests::{
    TestCluster, bafs_program, is_gone_or_empty, mount_obstacle, mounts_matching, printed_text,
    processes_matching, report_skip,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Time for everything to be gone.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

/// A job that takes a while, in a volume that it holds open.
const WORKFLOW: &str = "volume v scratch 1 MB\njob j {\nexecutable = /bin/sh\n\
    arguments = -c \"sleep 1; echo done > /v/out\"\n}\nmount v j /v\n\
    extract v out bafs://home/out\n";

fn start_run(workflow: &Path, temporary: &Path) -> Result<Child> {
    let mut command = Command::new(bafs_program());
    command
        .args(["run", "--local", "2"])
        .arg(workflow)
        .env("TMPDIR", temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.spawn().context("bafs run starts")
}

fn send_signal(pid: u32, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(i32::try_from(pid)?), signal)?)
}

#[expect(
    clippy::disallowed_methods,
    reason = "the promise is about real seconds"
)]
fn wait_until_gone(temporary: &Path) -> Result<()> {
    let text = temporary.to_string_lossy().into_owned();
    let started = Instant::now();
    loop {
        let left = [processes_matching(&text), mounts_matching(&text)].concat();
        if left.is_empty() {
            return Ok(());
        }
        ensure!(started.elapsed() < CLEANUP_TIMEOUT, "left behind: {left:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn cluster_ends_completely_after_any_signal() -> Result<()> {
    let name = "cluster_ends_completely_after_any_signal";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let workflow = directory.path().join("test.bafs");
    std::fs::write(&workflow, WORKFLOW)?;
    let temporary = directory.path().join("temporary");
    std::fs::create_dir(&temporary)?;
    let signals = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
    for (index, signal) in signals.into_iter().cycle().take(9).enumerate() {
        let mut run = start_run(&workflow, &temporary)?;
        std::thread::sleep(Duration::from_millis(20 + 110 * index as u64));
        send_signal(run.id(), signal)?;
        let status = run.wait()?;
        ensure!(!status.success(), "{signal}, moment {index}: {status}");
        wait_until_gone(&temporary)?;
        ensure!(
            is_gone_or_empty(&temporary),
            "{signal}, moment {index}: files stay"
        );
    }
    for moment_ms in [20, 300, 900] {
        let mut run = start_run(&workflow, &temporary)?;
        std::thread::sleep(Duration::from_millis(moment_ms));
        run.kill()?;
        run.wait()?;
        wait_until_gone(&temporary)?;
    }
    ensure!(
        !is_gone_or_empty(&temporary),
        "a killed run cannot remove its files"
    );
    ensure!(start_run(&workflow, &temporary)?.wait()?.success());
    ensure!(
        is_gone_or_empty(&temporary),
        "the next run removes what a killed one left"
    );
    Ok(())
}

/// A server ends in order when its terminal goes, unless whoever started it has that ignored.
#[test]
fn cluster_server_ends_with_its_terminal_by_default() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let identity = directory.path().join("identity");
    let made = Command::new(bafs_program())
        .arg("init")
        .arg(&identity)
        .output()?;
    ensure!(made.status.success(), printed_text(&made));
    let hangup = [Signal::SIGHUP, Signal::SIGTERM];
    for (before, signals) in [("", &hangup[..1]), ("trap '' HUP; ", &hangup[..])] {
        let script = format!("{before}exec \"$0\" catalog");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).arg(bafs_program());
        command.env("BAFS_IDENTITY", &identity);
        let mut server = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let output = server.stdout.as_mut().context("it is piped")?;
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line.contains("listening"), "{before}: {line:?}");
        for (index, signal) in signals.iter().enumerate() {
            if index > 0 {
                std::thread::sleep(Duration::from_millis(500));
                let ended = server.try_wait()?;
                ensure!(ended.is_none(), "{before}: {ended:?} before {signal}");
            }
            send_signal(server.id(), *signal)?;
        }
        let status = server.wait()?;
        ensure!(status.success(), "{before}: {status}");
    }
    Ok(())
}

/// `bafs exec` passes SIGTERM on to its job, and ends as the job does: by its own code where it has
/// one, else as shells say of a program that a signal ended.
#[test]
fn cluster_exec_forwards_signals_and_keeps_later_writes() -> Result<()> {
    let name = "cluster_exec_forwards_signals_and_keeps_later_writes";
    let Some(world) = start_cluster(name, "20MB")? else {
        return Ok(());
    };
    let made = world
        .bafs_command(&["volume", "create", "v", "--node", "n1", "--size", "1MB"])
        .output()?;
    ensure!(made.status.success(), printed_text(&made));
    let obeys = "trap 'echo saved > /vol/saved; exit 4' TERM; echo ready; \
        while :; do sleep 0.05; done";
    for (script, code) in [(obeys, 4), ("echo ready; sleep 60; echo", 143)] {
        let mut child = job_command(&world, &[], script).spawn()?;
        let mut line = String::new();
        let output = child.stdout.as_mut().context("it is piped")?;
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line == "ready\n", "{line}");
        send_signal(child.id(), Signal::SIGTERM)?;
        let status = child.wait()?;
        ensure!(status.code() == Some(code), "{script}: {status}");
    }
    let script = "cat /vol/saved";
    let read = job_command(&world, &[], script).output()?;
    ensure!(read.stdout == b"saved\n", printed_text(&read));
    check_programs_below_a_shell(&world)?;
    check_keyboard_signals(&world)
}

/// A shell that a signal ends at once leaves a program that needs a moment to save something. It
/// has that also where the terminal goes, which is told twice within milliseconds.
fn check_programs_below_a_shell(world: &TestCluster) -> Result<()> {
    let script = "cat > /vol/program <<'end'
trap 'sleep 0.5; echo below >> /vol/below; exit 4' TERM HUP
echo ready
while :; do sleep 0.05; done
end
sh /vol/program
echo after >> /vol/below";
    for (signal, times, code) in [(Signal::SIGTERM, 1, 143), (Signal::SIGHUP, 2, 129)] {
        let mut child = job_command(world, &[], script).spawn()?;
        let mut line = String::new();
        let output = child.stdout.as_mut().context("it is piped")?;
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line == "ready\n", "{line}");
        for _ in 0..times {
            send_signal(child.id(), signal)?;
            std::thread::sleep(Duration::from_millis(50));
        }
        let status = child.wait()?;
        ensure!(status.code() == Some(code), "{signal}: {status}");
    }
    let read = job_command(world, &[], "cat /vol/below").output()?;
    ensure!(read.stdout == b"below\nbelow\n", printed_text(&read));
    Ok(())
}

/// What a key says the job hears itself, once, and it goes on as long as it wants; what anybody
/// else sends is passed on, also where the job has the terminal.
fn check_keyboard_signals(world: &TestCluster) -> Result<()> {
    let script = "n=0; trap 'n=$((n+1)); echo heard $n; [ $n -lt 2 ] || exit 3' INT; \
        echo ready; while :; do sleep 0.05; done";
    let job = format!(
        "exec {} exec --mount v:/vol -- sh -c \"$SCRIPT\"",
        bafs_program().display()
    );
    let mut terminal = Command::new("script");
    terminal.args(["-qefc", &job, "/dev/null"]);
    terminal.env("SCRIPT", script).env("SHELL", "/bin/sh");
    terminal.env("BAFS_IDENTITY", world.cluster.identity());
    terminal.env("BAFS_CATALOG", world.cluster.catalog_address());
    let mut terminal = terminal
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut keys = terminal.stdin.take().context("it is piped")?;
    let mut lines = BufReader::new(terminal.stdout.take().context("it is piped")?).lines();
    let mut next = |word: &str| -> Result<()> {
        for line in &mut lines {
            if line?.contains(word) {
                return Ok(());
            }
        }
        anyhow::bail!("it never said '{word}'");
    };
    next("ready")?;
    keys.write_all(b"\x03")?;
    keys.flush()?;
    next("heard 1")?;
    // Longer than a job has that was asked to end.
    std::thread::sleep(Duration::from_secs(11));
    let exec = format!(
        "{} exec --mount v:/vol -- sh -c n=0",
        bafs_program().display()
    );
    let found = processes_matching(&exec);
    let found = found.iter().find_map(|line| {
        let (pid, command) = line.split_once(' ')?;
        command.starts_with(&exec).then_some(pid)
    });
    let pid = found.context("the job still runs")?;
    send_signal(pid.parse()?, Signal::SIGINT)?;
    next("heard 2")?;
    let status = terminal.wait()?;
    ensure!(status.code() == Some(3), "{status}");
    Ok(())
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the promise is about real seconds"
)]
fn cluster_ends_a_stuck_agent() -> Result<()> {
    let name = "cluster_ends_a_stuck_agent";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let world = TestCluster::start(&["20MB"])?;
    world.wait_for_servers(2)?;
    let path = world.write_workflow(WORKFLOW)?;
    let run = world
        .bafs_command(&["run", &path.to_string_lossy()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let agent = format!("agent --identity {}", world.cluster.identity().display());
    let started = Instant::now();
    let found = loop {
        if let Some(line) = processes_matching(&agent).into_iter().next() {
            break line;
        }
        ensure!(started.elapsed() < CLEANUP_TIMEOUT, "no agent was started");
        std::thread::sleep(Duration::from_millis(20));
    };
    std::thread::sleep(Duration::from_millis(300));
    let pid = found
        .split(' ')
        .next()
        .context("a line begins with a pid")?;
    send_signal(pid.parse()?, Signal::SIGSTOP)?;
    let output = run.wait_with_output()?;
    ensure!(output.status.success(), printed_text(&output));
    ensure!(
        started.elapsed() < Duration::from_secs(60),
        "it took too long"
    );
    ensure!(world.read_home("out")? == b"done\n", "the output is there");
    ensure!(
        processes_matching(&agent).is_empty(),
        "the stuck agent is left"
    );
    Ok(())
}

#[test]
fn cluster_completes_from_a_truncated_journal() -> Result<()> {
    let name = "cluster_completes_from_a_truncated_journal";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let world = TestCluster::start(&["20MB"])?;
    world.wait_for_servers(2)?;
    let path = world.write_workflow(&WORKFLOW.replace("sleep 1; ", ""))?;
    let journal = world.home.path().join("journal");
    let args = [
        "run",
        &path.to_string_lossy(),
        "--journal",
        &journal.to_string_lossy(),
    ];
    let output = world.bafs_command(&args).output()?;
    ensure!(output.status.success(), printed_text(&output));
    let whole = std::fs::read(&journal)?;
    for tenths in [6, 7, 8, 9] {
        std::fs::write(&journal, &whole[..whole.len() * tenths / 10])?;
        let output = world.bafs_command(&args).output()?;
        let text = printed_text(&output);
        // The header may be most of a small journal; without it nothing can be done.
        ensure!(
            output.status.success() || text.contains("header is not whole"),
            text
        );
        let volumes = world.run_json(&["volume", "list"])?;
        ensure!(volumes.as_array().is_some_and(Vec::is_empty), "{volumes}");
    }
    Ok(())
}
