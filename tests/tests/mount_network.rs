//! Scratch volumes behind the network, whose writer is answered before the server has run what it
//! asked: the limit, and the death of either side.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::IntoRawFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use bafs_proto::fd_passing::HANDOFF_SOCKET_NAME;
use bafs_tests::{TestCluster, exec_job, mounts_matching, printed_text, report_skip};
use nix::sys::signal::Signal;

const CALLS_MESSAGE: &str = "volume v: calls";

/// A node whose door is shut, with a volume `v` of 50 MB.
fn start_cluster(name: &str) -> Result<Option<TestCluster>> {
    let world = exec_job::start_cluster(name, "300MB")?;
    if let Some(world) = &world {
        disable_fd_passing(world)?;
        let create = ["volume", "create", "v", "--node", "n1", "--size", "50MB"];
        world.run_json(&create)?;
    }
    Ok(world)
}

fn disable_fd_passing(world: &TestCluster) -> Result<()> {
    Ok(fs::remove_file(
        world
            .cluster
            .directory()
            .join("n1")
            .join(HANDOFF_SOCKET_NAME),
    )?)
}

fn job_command(world: &TestCluster, script: &str) -> Command {
    exec_job::job_command(world, &[], script)
}

fn check_job(world: &TestCluster, script: &str, expected: &str) -> Result<()> {
    exec_job::check_job(world, &[], CALLS_MESSAGE, script, expected)
}

#[test]
fn mount_network_keeps_the_limit_exactly() -> Result<()> {
    let Some(world) = start_cluster("mount_network_keeps_the_limit_exactly")? else {
        return Ok(());
    };
    let fill = "cd /vol; dd if=/dev/zero of=a bs=1M count=100 2>&1 | grep -c 'No space left'; \
        sync a; test $(du -k a | cut -f1) -le 48829; test $(du -k a | cut -f1) -ge 48000; \
        df -k . | tail -1 | awk '{print ($2 <= 48832), ($4 < 1000)}'; rm a; \
        dd if=/dev/zero of=b bs=1M count=45 2>/dev/null; stat -c %s b";
    check_job(&world, fill, "1\n1 1\n47185920")?;
    let small = "cd /vol; rm b; mkdir d; n=0; \
        while dd if=/dev/zero of=d/$n bs=64k count=1 2>/dev/null; do n=$((n+1)); done; \
        echo $((n > 700 && n * 65536 <= 50000000)); rm -r d; ls";
    check_job(&world, small, "1")?;
    let shown = world.run_json(&["volume", "show", "v"])?;
    ensure!(shown["used_files"] == 0, "{shown}");
    Ok(())
}

#[test]
fn mount_network_keeps_direct_appends_in_order() -> Result<()> {
    let Some(world) = start_cluster("mount_network_keeps_direct_appends_in_order")? else {
        return Ok(());
    };
    exec_job::check_direct_appends(&world, CALLS_MESSAGE)
}

#[test]
fn mount_network_opens_concurrently_removed_files() -> Result<()> {
    let Some(world) = start_cluster("mount_network_opens_concurrently_removed_files")? else {
        return Ok(());
    };
    exec_job::check_name_races(&world, CALLS_MESSAGE)
}

#[test]
fn mount_network_keeps_synced_data_after_agent_kill() -> Result<()> {
    let Some(world) = start_cluster("mount_network_keeps_synced_data_after_agent_kill")? else {
        return Ok(());
    };
    let script = "cd /vol; mkdir d; for i in 1 2 3 4 5 6 7 8 9; do echo $i > d/$i; done; \
        echo whole > f; sync d/9 f; echo more >> f; sync f; echo ready; sleep 1000";
    let mut first = job_command(&world, script).spawn()?;
    let mut line = String::new();
    BufReader::new(first.stdout.take().context("its output")?).read_line(&mut line)?;
    ensure!(line.trim() == "ready", "the job said {line:?}");
    first.kill()?;
    first.wait()?;
    check_job(
        &world,
        "cd /vol; cat d/* | tr -d '\\n'; cat f",
        "123456789whole\nmore",
    )
}

/// A mount of `v` on a directory of the host, and the agent that serves it.
struct RemoteMount {
    agent: Child,
    directory: tempfile::TempDir,
}

impl RemoteMount {
    fn start(world: &TestCluster) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let at = directory.path().to_str().context("a path is text")?;
        let mut command = world.bafs_command(&["mount", "--explain", "v", at]);
        let agent = command.stderr(Stdio::piped()).spawn()?;
        let mut shown = Self { agent, directory };
        let said = shown.agent.stderr.take().context("what it says")?;
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        ensure!(
            line.contains(CALLS_MESSAGE) && line.contains("close"),
            "{line}"
        );
        for _ in 0..400 {
            if !mounts_matching(shown.mount_point()).is_empty() {
                return Ok(shown);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!("the volume is not mounted")
    }

    fn mount_point(&self) -> &str {
        self.directory.path().to_str().unwrap_or_default()
    }

    fn shell_command(&self, script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-ec", script])
            .current_dir(self.mount_point());
        command
    }

    fn kill_agent(&mut self) -> Result<()> {
        self.agent.kill()?;
        self.agent.wait()?;
        Ok(())
    }
}

impl Drop for RemoteMount {
    fn drop(&mut self) {
        // It may be gone already, which is what most tests want; its keeper takes the mount away.
        let _ = self.kill_agent();
        for _ in 0..200 {
            if mounts_matching(self.mount_point()).is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn mount_network_keeps_closed_host_files_after_kill() -> Result<()> {
    let name = "mount_network_keeps_closed_host_files_after_kill";
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    // Many times without a wait: what is not at the server yet would be lost with the agent.
    let mut expected = String::new();
    for round in 0..5 {
        let mut shown = RemoteMount::start(&world)?;
        let script = format!(
            "mkdir d{round}; i=0; while [ $i -lt 40 ]; do echo $i > d{round}/$i; i=$((i+1)); \
            done; echo more >> d{round}/39; chmod 600 d{round}/38; rm d{round}/0; \
            mkdir last{round}"
        );
        let status = shown.shell_command(&script).status()?;
        shown.kill_agent()?;
        ensure!(status.success(), "{script}: {status}");
        expected += "39 820 600 last\n";
    }
    let look = "cd /vol; for r in 0 1 2 3 4; do echo $(ls d$r | wc -l) \
        $(cat d$r/* | awk '/^[0-9]/ {s += $1} /more/ {s += 40} END {print s}') \
        $(stat -c %a d$r/38) $(test -d last$r && echo last); done";
    check_job(&world, look, expected.trim())
}

#[test]
fn mount_network_close_waits_for_the_server() -> Result<()> {
    let name = "mount_network_close_waits_for_the_server";
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    let mut shown = RemoteMount::start(&world)?;
    // The first file teaches the agent how files look here.
    ensure!(
        shown
            .shell_command("echo 1 > first; ls")
            .status()?
            .success()
    );
    world.cluster.signal("n1", Signal::SIGSTOP)?;
    // Nobody at the server answers these, and they would end the volume if they waited.
    let mut file = File::create(shown.directory.path().join("f"))?;
    file.write_all(b"2\n")?;
    let closing = std::thread::spawn(move || nix::unistd::close(file.into_raw_fd()));
    std::thread::sleep(Duration::from_millis(300));
    let waits = !closing.is_finished();
    world.cluster.signal("n1", Signal::SIGCONT)?;
    let closed = closing.join().map_err(|_| anyhow!("the close panicked"))?;
    shown.kill_agent()?;
    ensure!(waits, "it was closed before the server knew of it");
    closed.context("the close failed")?;
    check_job(&world, "cat /vol/first /vol/f", "1\n2")
}

#[test]
fn mount_network_flushes_before_its_job_ends() -> Result<()> {
    let Some(world) = start_cluster("mount_network_flushes_before_its_job_ends")? else {
        return Ok(());
    };
    let script = "cd /vol; mkdir d; i=0; while [ $i -lt 500 ]; do echo $i > d/$i; i=$((i+1)); \
        done; rm d/0; mv d/1 one; echo made";
    check_job(&world, script, "made")?;
    check_job(&world, "cd /vol; cat one; cat d/* | wc -l", "1\n498")
}

#[test]
fn mount_network_leaves_foreign_mounts_alone() -> Result<()> {
    let name = "mount_network_leaves_foreign_mounts_alone";
    if !nix::unistd::geteuid().is_root() {
        report_skip(name, "it needs root to mount on a directory of the host");
        return Ok(());
    }
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    let mut shown = RemoteMount::start(&world)?;
    let at = shown.mount_point().to_owned();
    let others = "cd /; umount -l $0; mount -t tmpfs other $0; echo kept > $0/kept";
    let mounted = Command::new("/bin/sh")
        .args(["-ec", others, &at])
        .status()?;
    ensure!(mounted.success(), "the other file system is not mounted");
    // It notices by itself.
    let ended = shown.agent.wait()?;
    let found = fs::read_to_string(shown.directory.path().join("kept"));
    let taken = Command::new("umount").arg(&at).status()?;
    ensure!(
        found? == "kept\n" && taken.success(),
        "the other file system is gone"
    );
    ensure!(ended.success(), "{ended}");
    Ok(())
}

#[test]
fn mount_network_survives_a_killed_server() -> Result<()> {
    let Some(mut world) = start_cluster("mount_network_survives_a_killed_server")? else {
        return Ok(());
    };
    let script = "cd /vol; mkdir d; echo ready; i=0; while [ $i -lt 3000 ]; do \
        echo $i > d/$i; [ $((i % 5)) -ne 0 ] || rm d/$i; i=$((i+1)); done; \
        ls d | wc -l; cat d/* | awk '{s += $1} END {print s}'";
    let mut job = job_command(&world, script).spawn()?;
    let mut lines = BufReader::new(job.stdout.take().context("its output")?).lines();
    let ready = lines.next().context("it begins")??;
    ensure!(ready == "ready", "the job said {ready:?}");
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(300));
        world.cluster.kill("n1")?;
        world.cluster.restart("n1")?;
    }
    let found: Vec<String> = lines.collect::<std::io::Result<_>>()?;
    let output = job.wait_with_output()?;
    let expected: u64 = (0..3000).filter(|i| i % 5 != 0).sum();
    let expected = ["2400".to_owned(), expected.to_string()];
    ensure!(found == expected, "{found:?}: {}", printed_text(&output));
    ensure!(output.status.success(), printed_text(&output));
    Ok(())
}
