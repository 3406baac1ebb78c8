//! Scratch volumes of this machine whose directory the server hands over: the limit, every kind of
//! death, and that no two writers ever work at once.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::exec_job::{self, ExecJob, job_command};
use bafs_tests::{TestCluster, mounts_matching, passthrough_obstacle, printed_text, report_skip};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const INLINE_MESSAGE: &str = "volume v: inline";
const CALLS_MESSAGE: &str = "volume v: calls";

fn start_cluster(name: &str) -> Result<Option<TestCluster>> {
    let world = exec_job::start_cluster(name, "300MB")?;
    if let Some(world) = &world {
        let create = ["volume", "create", "v", "--node", "n1", "--size", "50MB"];
        world.run_json(&create)?;
    }
    Ok(world)
}

fn run_job(world: &TestCluster, script: &str) -> Result<Output> {
    job_command(world, &[], script)
        .output()
        .context("bafs exec runs")
}

/// Mounts the volume on the host to be read, and waits until it is there.
fn mount_read_only(world: &TestCluster, path: &str) -> Result<Child> {
    let mount = world
        .bafs_command(&["mount", "--explain", "--read-only", "v", path])
        .stderr(Stdio::piped())
        .spawn()?;
    for _ in 0..200 {
        if !mounts_matching(path).is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(mount)
}

fn check_job(world: &TestCluster, script: &str, expected: &str) -> Result<()> {
    exec_job::check_job(world, &[], INLINE_MESSAGE, script, expected)
}

#[test]
fn mount_inline_keeps_the_limit_exactly() -> Result<()> {
    let Some(world) = start_cluster("mount_inline_keeps_the_limit_exactly")? else {
        return Ok(());
    };
    // By size: `du` counts also what ext4 takes to list the pieces of a file.
    let fill = "cd /vol; dd if=/dev/zero of=a bs=1M count=100 2>&1 | grep -c 'No space left'; \
        sync a; stat -c %s a | awk '{print ($1 <= 50000000), ($1 >= 49152000)}'; \
        df -k . | tail -1 | awk '{print ($2 <= 48832), ($4 < 1000)}'; rm a; \
        dd if=/dev/zero of=b bs=1M count=45 2>/dev/null; stat -c %s b";
    check_job(&world, fill, "1\n1 1\n1 1\n47185920")?;
    // What is there counts for the next job, which counts anew, and for the server.
    let rest = "cd /vol; dd if=/dev/zero of=c bs=1M count=10 2>&1 | grep -c 'No space left'; rm c";
    check_job(&world, rest, "1")?;
    let shown = world.run_json(&["volume", "show", "v"])?;
    let used = shown["used_bytes"].as_u64().context("bytes")?;
    ensure!((47_185_920..47_300_000).contains(&used), "{shown}");
    ensure!(shown["used_files"] == 1, "{shown}");
    Ok(())
}

#[test]
fn mount_inline_keeps_direct_appends_in_order() -> Result<()> {
    let Some(world) = start_cluster("mount_inline_keeps_direct_appends_in_order")? else {
        return Ok(());
    };
    exec_job::check_direct_appends(&world, INLINE_MESSAGE)
}

#[test]
fn mount_inline_opens_concurrently_removed_files() -> Result<()> {
    let Some(world) = start_cluster("mount_inline_opens_concurrently_removed_files")? else {
        return Ok(());
    };
    exec_job::check_name_races(&world, INLINE_MESSAGE)
}

#[test]
fn mount_inline_loses_nothing_with_its_agent() -> Result<()> {
    let Some(world) = start_cluster("mount_inline_loses_nothing_with_its_agent")? else {
        return Ok(());
    };
    let script = "echo one > /vol/f; sync /vol/f; echo two > /vol/g; mkdir /vol/d; \
        exec 3>/vol/gone; rm /vol/gone; dd if=/dev/zero bs=1M count=20 >&3 2>/dev/null; \
        echo ready; sleep 1000";
    let busy = ExecJob::start(&world, &[], script)?;
    busy.send_signal(Signal::SIGKILL)?;
    busy.wait_for_end()?;
    check_job(&world, "cat /vol/f /vol/g; ls /vol", "one\ntwo\nd\nf\ng")?;
    // The space of the file that only the dead agent had open is free.
    let fill = "dd if=/dev/zero of=/vol/h bs=1M count=45 2>/dev/null; stat -c %s /vol/h";
    check_job(&world, fill, "47185920")
}

#[test]
fn mount_inline_writer_is_fenced_by_the_next() -> Result<()> {
    let Some(world) = start_cluster("mount_inline_writer_is_fenced_by_the_next")? else {
        return Ok(());
    };
    let script = "echo 0 > /vol/first; echo ready; i=0; \
        while :; do i=$((i+1)); echo $i > /vol/first; done";
    let first = ExecJob::start(&world, &[], script)?;
    // Nothing of the first comes after the second has its volume.
    let look = "cp /vol/first /vol/seen; sleep 1; cmp /vol/first /vol/seen; echo same";
    check_job(&world, look, "same")?;
    let ended = first.wait_for_end()?;
    ensure!(ended.status.code() == Some(75), printed_text(&ended));
    ensure!(
        printed_text(&ended).contains("Fenced"),
        printed_text(&ended)
    );
    Ok(())
}

#[test]
fn mount_inline_hanging_writer_excludes_others() -> Result<()> {
    let Some(world) = start_cluster("mount_inline_hanging_writer_excludes_others")? else {
        return Ok(());
    };
    let first = ExecJob::start(&world, &[], "echo ready; sleep 1000")?;
    first.send_signal(Signal::SIGSTOP)?;
    let refused =
        job_command(&world, &["--operation-timeout", "5"], "echo in > /vol/x").output()?;
    ensure!(refused.status.code() == Some(75), printed_text(&refused));
    ensure!(
        printed_text(&refused).contains("Busy"),
        printed_text(&refused)
    );
    first.send_signal(Signal::SIGCONT)?;
    let ended = first.wait_for_end()?;
    ensure!(ended.status.code() == Some(75), printed_text(&ended));
    check_job(&world, "ls /vol; echo in > /vol/x; cat /vol/x", "in")
}

#[test]
fn mount_inline_job_ends_with_its_server() -> Result<()> {
    let Some(mut world) = start_cluster("mount_inline_job_ends_with_its_server")? else {
        return Ok(());
    };
    let script = "echo kept > /vol/f; echo ready; while :; do echo x >> /vol/log; done";
    let busy = ExecJob::start(&world, &["--operation-timeout", "3"], script)?;
    world.cluster.kill("n1")?;
    let ended = busy.wait_for_end()?;
    ensure!(ended.status.code() == Some(75), printed_text(&ended));
    ensure!(
        printed_text(&ended).contains("cannot continue"),
        printed_text(&ended)
    );
    world.cluster.restart("n1")?;
    world.wait_for_servers(2)?;
    check_job(&world, "cat /vol/f", "kept")
}

#[test]
fn mount_inline_writer_survives_a_server_restart() -> Result<()> {
    let name = "mount_inline_writer_survives_a_server_restart";
    let Some(mut world) = start_cluster(name)? else {
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let end = directory.path().join("end");
    // What is open stays open, even without a name; numbers, contents and the limit stay exact.
    let script = format!(
        "cd /vol; echo hidden > gone; exec 3< gone 4>> log; rm gone; ino=$(stat -c %i log); \
        echo ready; i=0; while [ ! -e {} ]; do echo $i >&4; i=$((i+1)); done; exec 4>&-; \
        read word <&3; test $word = hidden; test $(wc -l < log) = $i; \
        test $(stat -c %i log) = $ino; exec 3<&-; rm log; \
        dd if=/dev/zero of=a bs=1M count=100 2>&1 | grep -q 'No space left'; \
        test $(du -k a | cut -f1) -ge 48000; test $(du -k a | cut -f1) -le 48829; \
        rm a; echo done > last",
        end.display()
    );
    let busy = ExecJob::start(&world, &[], &script)?;
    for _ in 0..2 {
        world.cluster.kill("n1")?;
        world.cluster.restart("n1")?;
        world.wait_for_servers(2)?;
    }
    std::fs::write(&end, "")?;
    let ended = busy.wait_for_end()?;
    ensure!(ended.status.success(), printed_text(&ended));
    check_job(&world, "cd /vol; ls; cat last", "last\ndone")
}

#[test]
fn mount_inline_job_completes_without_its_server() -> Result<()> {
    let name = "mount_inline_job_completes_without_its_server";
    let Some(mut world) = start_cluster(name)? else {
        return Ok(());
    };
    let mut options = Vec::new();
    let others = ["w", "x", "y"];
    let mounts = others.map(|name| format!("{name}:/{name}"));
    for (name, mount) in others.iter().zip(&mounts) {
        world.run_json(&["volume", "create", name, "--node", "n1", "--size", "1MB"])?;
        options.extend(["--mount", mount.as_str()]);
    }
    let directory = tempfile::tempdir()?;
    let end = directory.path().join("end");
    let script = format!(
        "echo ready; while [ ! -e {} ]; do sleep 0.1; done",
        end.display()
    );
    let busy = ExecJob::start(&world, &options, &script)?;
    world.cluster.kill("n1")?;
    std::fs::write(&end, "")?;
    // More volumes than the agent has threads, and none of them keeps it.
    let ended = busy.wait_for_end()?;
    ensure!(ended.status.success(), printed_text(&ended));
    Ok(())
}

#[test]
fn mount_inline_reader_works_beside_a_writer() -> Result<()> {
    let Some(world) = start_cluster("mount_inline_reader_works_beside_a_writer")? else {
        return Ok(());
    };
    let script = "echo here > /vol/f; echo ready; read end || true; \
        dd if=/dev/zero of=/vol/g bs=1M count=100 2>&1 | grep 'No space left'";
    let mut command = job_command(&world, &[], script);
    let mut writer = command.stdin(Stdio::piped()).spawn()?;
    let mut said_ready = String::new();
    let mut stdout = BufReader::new(writer.stdout.take().context("its output")?);
    stdout.read_line(&mut said_ready)?;
    let point = tempfile::tempdir()?;
    let path = point.path().to_string_lossy().into_owned();
    let mount = mount_read_only(&world, &path)?;
    let read = std::fs::read(point.path().join("f"));
    let refused = std::fs::write(point.path().join("h"), b"x").is_err();
    // The writer still accounts for everything.
    drop(writer.stdin.take());
    let mut full = String::new();
    stdout.read_line(&mut full)?;
    let writer = writer.wait_with_output()?;
    kill(Pid::from_raw(i32::try_from(mount.id())?), Signal::SIGTERM)?;
    let mount = mount.wait_with_output()?;
    ensure!(read? == b"here\n" && refused, "a view to read only");
    ensure!(full.contains("No space left"), printed_text(&writer));
    ensure!(
        printed_text(&writer).contains(INLINE_MESSAGE),
        printed_text(&writer)
    );
    ensure!(
        printed_text(&mount).contains(INLINE_MESSAGE),
        printed_text(&mount)
    );
    Ok(())
}

#[test]
fn mount_inline_reader_sees_overwrites_of_large_files() -> Result<()> {
    let name = "mount_inline_reader_sees_overwrites_of_large_files";
    let point = tempfile::tempdir()?;
    if let Some(reason) = passthrough_obstacle(point.path()) {
        report_skip(name, reason);
        return Ok(());
    }
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    let script = "head -c 2M /dev/zero > /vol/f; echo small > /vol/g; echo ready; read go; \
        printf new | dd of=/vol/f bs=3 conv=notrunc; echo written; read end || true";
    let mut command = job_command(&world, &[], script);
    let mut writer = command.stdin(Stdio::piped()).spawn()?;
    let mut stdout = BufReader::new(writer.stdout.take().context("its output")?);
    let mut line = String::new();
    stdout.read_line(&mut line)?;
    let path = point.path().to_string_lossy().into_owned();
    let mount = mount_read_only(&world, &path)?;
    // What the kernel keeps of it beside the file itself would be what it is now.
    let before = std::fs::read(point.path().join("f"));
    let small = std::fs::read(point.path().join("g"));
    let open = std::fs::File::open(point.path().join("f"));
    writer
        .stdin
        .as_mut()
        .context("its input")?
        .write_all(b"go\n")?;
    stdout.read_line(&mut line)?;
    let mut after = [0; 4];
    let read = open.and_then(|file| file.read_exact_at(&mut after, 0));
    drop(writer.stdin.take());
    let writer = writer.wait_with_output()?;
    kill(Pid::from_raw(i32::try_from(mount.id())?), Signal::SIGTERM)?;
    let mount = mount.wait_with_output()?;
    ensure!(
        line == "ready\nwritten\n",
        "{line}{}",
        printed_text(&writer)
    );
    ensure!(
        before? == vec![0; 2 << 20] && small? == b"small\n",
        "as it was written"
    );
    read?;
    ensure!(&after == b"new\0", "{after:?}");
    ensure!(
        printed_text(&mount).contains("the kernel reads"),
        printed_text(&mount)
    );
    Ok(())
}

#[test]
fn mount_inline_names_the_channel_to_its_node() -> Result<()> {
    let Some(world) = start_cluster("mount_inline_names_the_channel_to_its_node")? else {
        return Ok(());
    };
    for (channel, name) in [("quic", "QUIC"), ("tcp", "TCP")] {
        let told = format!("over {name}");
        exec_job::check_job(&world, &["--channel", channel], &told, "echo here", "here")?;
    }
    Ok(())
}

#[test]
fn mount_inline_writer_with_readers_uses_the_server() -> Result<()> {
    let name = "mount_inline_writer_with_readers_uses_the_server";
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    let args = ["exec", "--mount", "v:/vol:ro", "--", "/bin/sh", "-c"];
    let mut reader = world
        .bafs_command(&[&args[..], &["echo ready; exec sleep 1000"]].concat())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(reader.stdout.take().context("its output")?).read_line(&mut line)?;
    let output = run_job(&world, "echo x > /vol/f; cat /vol/f")?;
    kill(Pid::from_raw(i32::try_from(reader.id())?), Signal::SIGTERM)?;
    reader.wait()?;
    ensure!(output.status.success(), printed_text(&output));
    ensure!(
        printed_text(&output).contains(CALLS_MESSAGE),
        printed_text(&output)
    );
    check_job(&world, "cat /vol/f", "x")
}

#[test]
fn mount_inline_keeps_the_open_file_limit() -> Result<()> {
    let name = "mount_inline_keeps_the_open_file_limit";
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    let own = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE)?.0;
    check_job(&world, "ulimit -Sn", &own.to_string())
}
