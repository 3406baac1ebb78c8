//! Scratch volumes whose limit is watched: a job of the same machine works on the directory itself.
//! The limit, every kind of death, and that no two writers ever work at once.

use anyhow::{Context, Result, ensure};
use bafs_tests::exec_job::{self, ExecJob, job_command};
use bafs_tests::{TestCluster, printed_text};
use nix::sys::signal::Signal;

const BIND_MOUNT_MESSAGE: &str = "volume v: directory";
const INLINE_MESSAGE: &str = "volume v: inline";

/// A node of 1 GB with a watched volume `v` of 20 MB and 1,000 files.
fn start_cluster(name: &str) -> Result<Option<TestCluster>> {
    let world = exec_job::start_cluster(name, "1GB")?;
    if let Some(world) = &world {
        create_volume(world, "v", "20MB", "1000")?;
    }
    Ok(world)
}

fn create_volume(
    world: &TestCluster,
    name: &str,
    size: &str,
    files: &str,
) -> Result<serde_json::Value> {
    let create = [
        "volume", "create", name, "--node", "n1", "--limit", "watched",
    ];
    world.run_json(&[&create[..], &["--size", size, "--files", files]].concat())
}

fn check_job(world: &TestCluster, script: &str, expected: &str) -> Result<()> {
    exec_job::check_job(world, &[], BIND_MOUNT_MESSAGE, script, expected)
}

/// Runs a job that must be ended for this reason.
fn check_job_is_ended(world: &TestCluster, script: &str, reason: &str) -> Result<()> {
    let ended = job_command(world, &[], script).output()?;
    ensure!(ended.status.code() == Some(75), printed_text(&ended));
    ensure!(printed_text(&ended).contains(reason), printed_text(&ended));
    Ok(())
}

#[test]
fn mount_bind_shows_the_directory_itself() -> Result<()> {
    let Some(world) = start_cluster("mount_bind_shows_the_directory_itself")? else {
        return Ok(());
    };
    // The kernel serves it, and set-user-id has no effect.
    let look = "echo x > /vol/f; chmod 6755 /vol/f; mkfifo /vol/p; \
        grep ' /vol ' /proc/self/mountinfo | grep -c fuse || true; \
        grep ' /vol ' /proc/self/mountinfo | cut -d' ' -f6 | tr , '\\n' | grep -c '^no[sd]'";
    check_job(&world, look, "0\n2")?;
    let shown = world.run_json(&["volume", "show", "v"])?;
    ensure!(shown["used_files"] == 2, "{shown}");
    // A reader sees it, and changes nothing.
    let args = [
        "exec",
        "--explain",
        "--mount",
        "v:/vol:ro",
        "--",
        "/bin/sh",
        "-c",
    ];
    let look = "cat /vol/f; echo y > /vol/f || echo refused; rm -f /vol/f; ls /vol";
    let output = world
        .bafs_command(&[&args[..], &[look]].concat())
        .output()?;
    let found = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(found == "x\nrefused\nf\np\n", printed_text(&output));
    ensure!(
        printed_text(&output).contains(BIND_MOUNT_MESSAGE),
        printed_text(&output)
    );
    Ok(())
}

#[test]
fn mount_bind_ends_jobs_past_the_limit() -> Result<()> {
    let Some(world) = start_cluster("mount_bind_ends_jobs_past_the_limit")? else {
        return Ok(());
    };
    let fill = "cd /vol; while :; do cat /bin/sh >> f; done";
    check_job_is_ended(&world, fill, "make it larger")?;
    let many = "cd /vol; rm f; i=0; while :; do i=$((i+1)); : > $i; done";
    check_job_is_ended(&world, many, "make it larger")?;
    // A file without a name takes as much as one with a name.
    let hidden = "cd /vol; exec 9> g; rm g; while :; do cat /bin/sh >&9; done";
    check_job_is_ended(&world, hidden, "make it larger")?;
    check_job(
        &world,
        "cd /vol; find . -type f -delete; echo 1 > f; ls",
        "f",
    )
}

#[test]
fn mount_bind_reserves_a_margin() -> Result<()> {
    let Some(world) = start_cluster("mount_bind_reserves_a_margin")? else {
        return Ok(());
    };
    // 1 GB less eleven times 20 MB and 64 MiB: a twelfth one has no room for its margin.
    for number in 1..11 {
        create_volume(&world, &format!("w{number}"), "20MB", "1000")?;
    }
    ensure!(
        create_volume(&world, "x", "20MB", "1000").is_err(),
        "a twelfth one"
    );
    Ok(())
}

#[test]
fn mount_bind_is_the_default_of_large_volumes() -> Result<()> {
    let name = "mount_bind_is_the_default_of_large_volumes";
    let Some(world) = exec_job::start_cluster(name, "5GB")? else {
        return Ok(());
    };
    let create = ["volume", "create", "--node", "n1", "--size"];
    let make = |more: &[&str]| world.run_json(&[&create[..], more].concat());
    make(&["700MB", "v"])?;
    check_job(&world, "echo x > /vol/f; ls /vol", "f")?;
    world.run_json(&["volume", "delete", "v"])?;
    make(&["700MB", "v", "--limit", "exact"])?;
    exec_job::check_job(&world, &[], "as its owner asked for", "ls /vol", "")?;
    world.run_json(&["volume", "delete", "v"])?;
    make(&["600MB", "v"])?;
    exec_job::check_job(&world, &[], "too small to be watched", "ls /vol", "")
}

/// How far past it they come depends on the load of the machine: see decision 0050.
#[test]
fn mount_bind_ends_jobs_that_write_past_the_limit() -> Result<()> {
    let name = "mount_bind_ends_jobs_that_write_past_the_limit";
    let Some(world) = exec_job::start_cluster(name, "5GB")? else {
        return Ok(());
    };
    let create = ["volume", "create", "v", "--node", "n1", "--size", "700MB"];
    world.run_json(&create)?;
    let held = |field: &str| -> Result<u64> {
        let shown = world.run_json(&["volume", "show", "v"])?;
        shown[field].as_u64().context("a number")
    };
    let fill = "cd /vol; for i in 1 2; do cat /dev/zero > f$i & done; wait";
    check_job_is_ended(&world, fill, "make it larger")?;
    let bytes = held("used_bytes")?;
    ensure!(bytes >= 700_000_000, "{bytes} bytes");
    let many = "cd /vol; rm -f f*; for i in 1 2; do mkdir $i; (cd $i; seq 200000 | \
        xargs -n 1000 touch) & done; wait";
    check_job_is_ended(&world, many, "make it larger")?;
    let files = held("used_files")?;
    ensure!(files >= 42_724, "{files} files");
    Ok(())
}

#[test]
fn mount_bind_loses_nothing_with_its_agent() -> Result<()> {
    let Some(world) = start_cluster("mount_bind_loses_nothing_with_its_agent")? else {
        return Ok(());
    };
    let script = "echo one > /vol/f; mkdir /vol/d; echo 0 > /vol/last; echo ready; \
        i=0; while :; do i=$((i+1)); echo $i > /vol/last; done";
    let busy = ExecJob::start(&world, &[], script)?;
    busy.send_signal(Signal::SIGKILL)?;
    busy.wait_for_end()?;
    // Nothing of the first comes after the second has its volume.
    let look = "cp /vol/last /vol/seen; sleep 1; cmp /vol/last /vol/seen; cat /vol/f; ls -d /vol/d";
    check_job(&world, look, "one\n/vol/d")
}

#[test]
fn mount_bind_writer_is_fenced_by_the_next() -> Result<()> {
    let Some(world) = start_cluster("mount_bind_writer_is_fenced_by_the_next")? else {
        return Ok(());
    };
    let script = "echo 0 > /vol/first; echo ready; i=0; \
        while :; do i=$((i+1)); echo $i > /vol/first; done";
    let first = ExecJob::start(&world, &[], script)?;
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
fn mount_bind_job_ends_with_its_volume() -> Result<()> {
    let Some(world) = start_cluster("mount_bind_job_ends_with_its_volume")? else {
        return Ok(());
    };
    let busy = ExecJob::start(
        &world,
        &[],
        "echo ready; while :; do echo x >> /vol/f; done",
    )?;
    world.run_json(&["volume", "delete", "v"])?;
    let ended = busy.wait_for_end()?;
    ensure!(ended.status.code() == Some(75), printed_text(&ended));
    let path = world.cluster.directory().join("n1/volumes");
    let left = std::fs::read_dir(path).context("the store")?.count();
    ensure!(left == 0, "{left} volumes are left");
    Ok(())
}

#[test]
fn mount_bind_job_ends_with_its_server() -> Result<()> {
    let Some(mut world) = start_cluster("mount_bind_job_ends_with_its_server")? else {
        return Ok(());
    };
    let script = "echo kept > /vol/f; echo ready; while :; do echo x > /vol/g; done";
    let busy = ExecJob::start(&world, &[], script)?;
    world.cluster.kill("n1")?;
    let ended = busy.wait_for_end()?;
    ensure!(ended.status.code() == Some(75), printed_text(&ended));
    world.cluster.restart("n1")?;
    world.wait_for_servers(2)?;
    check_job(&world, "cat /vol/f", "kept")
}

#[test]
fn mount_bind_serves_jobs_but_not_the_host() -> Result<()> {
    let Some(world) = start_cluster("mount_bind_serves_jobs_but_not_the_host")? else {
        return Ok(());
    };
    check_job(&world, "echo x > /vol/f", "")?;
    let point = tempfile::tempdir()?;
    let at = point.path().to_str().context("a temporary path is text")?;
    let mut mount = world.bafs_command(&["mount", "--explain", "v", at]);
    let mount = mount.stderr(std::process::Stdio::piped()).spawn()?;
    for _ in 0..200 {
        if point.path().join("f").exists() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(i32::try_from(mount.id())?),
        Signal::SIGTERM,
    )?;
    let output = mount.wait_with_output()?;
    ensure!(
        printed_text(&output).contains(INLINE_MESSAGE),
        printed_text(&output)
    );
    Ok(())
}
