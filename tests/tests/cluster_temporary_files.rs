//! Jobs at once on one machine, whose programs name temporary files, locks and sessions after their
//! process id: as root, in user name spaces, on several nodes and in several runs.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, bafs_program, exec_job, mount_obstacle, printed_text, report_skip};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Writes a workflow of so many jobs with a volume each; `$(i)` is their number, and what a job
/// puts into `out` comes home as `out.$(i)`.
fn write_workflow(directory: &Path, jobs: u32, script: &str, more: &str) -> Result<()> {
    let text = format!(
        "for i in 1..{jobs}\n\
         volume w$(i) scratch 1 MB\n\
         job j$(i) {{\n executable = /bin/sh\n arguments = -c '{script}'\n directory = /w\n}}\n\
         mount w$(i) j$(i) /w\n\
         extract w$(i) out bafs://home/out.$(i)\n\
         {more}\n\
         end\n"
    );
    Ok(fs::write(directory.join("test.bafs"), text)?)
}

fn run_command(directory: &Path, nodes: u32) -> Command {
    let mut run = Command::new(bafs_program());
    run.arg("run").arg(directory.join("test.bafs"));
    run.args(["--local", &nodes.to_string()]);
    run.stdin(Stdio::null());
    run.stdout(Stdio::piped()).stderr(Stdio::piped());
    run
}

fn read_result(directory: &Path, job: u32) -> Result<String> {
    let path = directory.join(format!("out.{job}"));
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

fn check_success(output: &Output) -> Result<()> {
    ensure!(output.status.success(), "{}", printed_text(output));
    Ok(())
}

/// Whether this machine lacks what these tests need.
fn is_skipped(test: &str) -> bool {
    let reason = mount_obstacle();
    if let Some(reason) = &reason {
        report_skip(test, reason);
    }
    reason.is_some()
}

/// Names a file in `/tmp` after its process id, as many programs do, and waits for the others.
const NAMED_BY_PID_SCRIPT: &str = "echo $(i) > /tmp/bafs-trial.$$; sleep 1; \
    cat /tmp/bafs-trial.$$ > out; rm -f /tmp/bafs-trial.$$";

#[test]
fn cluster_concurrent_jobs_keep_temporary_files_apart() -> Result<()> {
    if is_skipped("cluster_concurrent_jobs_keep_temporary_files_apart") {
        return Ok(());
    }
    for more in ["", "share /tmp j$(i)"] {
        let directory = tempfile::tempdir()?;
        write_workflow(directory.path(), 4, NAMED_BY_PID_SCRIPT, more)?;
        check_success(&run_command(directory.path(), 2).output()?)?;
        for job in 1..=4 {
            let found = read_result(directory.path(), job)?;
            ensure!(found == format!("{job}\n"), "{more}: job {job} has {found}");
        }
    }
    Ok(())
}

#[test]
fn cluster_concurrent_runs_have_different_process_ids() -> Result<()> {
    if is_skipped("cluster_concurrent_runs_have_different_process_ids") {
        return Ok(());
    }
    let script = "echo $$ > out; sh -c \"echo \\$\\$\" >> out; sleep 1";
    let directories = [tempfile::tempdir()?, tempfile::tempdir()?];
    let mut runs = Vec::new();
    for directory in &directories {
        write_workflow(directory.path(), 3, script, "")?;
        runs.push(run_command(directory.path(), 3).spawn()?);
    }
    for run in runs {
        check_success(&run.wait_with_output()?)?;
    }
    let mut ids = BTreeSet::new();
    for directory in &directories {
        for job in 1..=3 {
            let found = read_result(directory.path(), job)?;
            for id in found.lines() {
                ensure!(ids.insert(id.parse::<u32>()?), "{id} twice: {ids:?}");
            }
        }
    }
    ensure!(ids.len() == 12 && ids.first() > Some(&300), "{ids:?}");
    Ok(())
}

/// An MPI program that needs no compiler: both processes say who they are, and a sum over both.
const RING_SCRIPT: &str = "import ctypes as c, os, time\n\
    m = c.CDLL('libmpi.so.40', c.RTLD_GLOBAL)\n\
    assert m.MPI_Init(None, None) == 0\n\
    of = lambda name: c.byref(c.c_char.in_dll(m, name))\n\
    world, add, int = of('ompi_mpi_comm_world'), of('ompi_mpi_op_sum'), of('ompi_mpi_int')\n\
    rank, total = c.c_int(), c.c_int()\n\
    m.MPI_Comm_rank(world, c.byref(rank))\n\
    mine = c.c_int(rank.value + 1)\n\
    m.MPI_Allreduce(c.byref(mine), c.byref(total), 1, int, add, world)\n\
    time.sleep(1)\n\
    m.MPI_Finalize()\n\
    # One write: ranks share the file.\n\
    os.write(1, b\"%d %d\\n\" % (rank.value, total.value))\n";

#[test]
fn cluster_runs_three_mpi_jobs_at_once() -> Result<()> {
    let name = "cluster_runs_three_mpi_jobs_at_once";
    if is_skipped(name) {
        return Ok(());
    }
    if Command::new("mpirun").arg("--version").output().is_err() {
        report_skip(name, "no mpirun: install openmpi-bin");
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let ring = directory.path().join("ring.py");
    fs::write(&ring, RING_SCRIPT)?;
    let script = format!(
        "mpirun --allow-run-as-root --oversubscribe -n 2 python3 {} > out 2> err || \
         {{ cat err >&2; exit 1; }}",
        ring.display()
    );
    write_workflow(directory.path(), 3, &script, "")?;
    check_success(&run_command(directory.path(), 3).output()?)?;
    for job in 1..=3 {
        let found = read_result(directory.path(), job)?;
        let ranks: BTreeSet<&str> = found.lines().collect();
        ensure!(
            ranks == BTreeSet::from(["0 3", "1 3"]),
            "job {job}: {found}"
        );
    }
    Ok(())
}

#[test]
fn cluster_jobs_start_with_an_empty_tmpdir() -> Result<()> {
    if is_skipped("cluster_jobs_start_with_an_empty_tmpdir") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let script = format!(
        "{{ echo $TMPDIR; {}; ls -A /var/tmp /dev/shm; }} > out; touch /tmp/x /dev/shm/x",
        list_tmp()
    );
    write_workflow(directory.path(), 2, &script, "parent_of_none")?;
    let text = fs::read_to_string(directory.path().join("test.bafs"))?;
    // The second runs after the first, and finds nothing of it.
    let text = text.replace("parent_of_none\n", "") + "parent j1 child j2\n";
    fs::write(directory.path().join("test.bafs"), text)?;
    let mut run = run_command(directory.path(), 1);
    check_success(&run.env("TMPDIR", directory.path()).output()?)?;
    for job in 1..=2 {
        let found = read_result(directory.path(), job)?;
        ensure!(found == "/tmp\n/dev/shm:\n\n/var/tmp:\n", "{found}");
    }
    Ok(())
}

#[test]
fn cluster_ends_jobs_past_their_tmp_quota() -> Result<()> {
    if is_skipped("cluster_ends_jobs_past_their_tmp_quota") {
        return Ok(());
    }
    let mut world = TestCluster::start(&[])?;
    let share = ["--size", "100MB", "--slots", "1", "--tmp", "5MB"];
    world.cluster.add_node("n1", &share)?;
    world.wait_for_servers(2)?;
    let script = "head -c 50M /dev/zero > /tmp/large; sleep 60; touch out";
    write_workflow(world.home.path(), 1, script, "")?;
    let path = world.home.path().join("test.bafs");
    let output = world
        .bafs_command(&["run", &path.to_string_lossy()])
        .output()?;
    let told = printed_text(&output);
    ensure!(output.status.code() == Some(1), "{told}");
    for word in ["/tmp", "may have 5 MB", "--tmp"] {
        ensure!(told.contains(word), "no {word}: {told}");
    }
    ensure!(!told.contains("larger volume"), "{told}");
    let left = world.cluster.directory().join("n1/temporary");
    ensure!(fs::read_dir(left)?.count() == 0, "its files are left");
    Ok(())
}

#[test]
fn cluster_node_removes_temporary_files_of_killed_incarnations() -> Result<()> {
    if is_skipped("cluster_node_removes_temporary_files_of_killed_incarnations") {
        return Ok(());
    }
    let mut world = TestCluster::start(&["100MB"])?;
    world.wait_for_servers(2)?;
    write_workflow(world.home.path(), 1, "touch /tmp/made out; sleep 60", "")?;
    let path = world.home.path().join("test.bafs");
    let mut running = world
        .bafs_command(&["run", &path.to_string_lossy()])
        .spawn()?;
    let temporary = world.cluster.directory().join("n1/temporary");
    let made = || {
        let mut entries = fs::read_dir(&temporary).ok()?.flatten();
        entries.find(|entry| entry.path().join("tmp/made").exists())
    };
    for _ in 0..400 {
        if made().is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let made = made().context("the job makes its file")?;
    kill(Pid::from_raw(i32::try_from(running.id())?), Signal::SIGKILL)?;
    running.wait()?;
    world.cluster.kill("n1")?;
    ensure!(made.path().exists(), "somebody else removed it");
    world.cluster.restart("n1")?;
    ensure!(!made.path().exists(), "it is left");
    Ok(())
}

#[test]
fn cluster_shares_a_parent_with_its_mount_point() -> Result<()> {
    if is_skipped("cluster_shares_a_parent_with_its_mount_point") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let home = directory.path().join("me");
    fs::create_dir(&home)?;
    let text = format!(
        "for i in 1..2\n\
         volume w$(i) scratch 1 MB\n\
         job j$(i) {{\n\
           executable = /bin/sh\n\
           arguments = -c 'mkdir {home}/cache$(i) && sleep 0.5 && touch {home}/cache$(i)/x && \
             echo fine > out'\n\
         }}\n\
         mount w$(i) j$(i) {home}/work\n\
         extract w$(i) out bafs://home/out.$(i)\n\
         end\n",
        home = home.display()
    );
    fs::write(directory.path().join("test.bafs"), text)?;
    check_success(&run_command(directory.path(), 1).output()?)?;
    for job in 1..=2 {
        ensure!(read_result(directory.path(), job)? == "fine\n");
        ensure!(home.join(format!("cache{job}/x")).exists());
    }
    ensure!(!home.join("work").exists(), "the mount point is left");
    Ok(())
}

/// Lists `/tmp`. A checkout that lies there stays visible, because the tests start jobs in it.
fn list_tmp() -> String {
    let directory = std::env::current_dir().unwrap_or_default();
    let below = directory
        .strip_prefix("/tmp")
        .unwrap_or_else(|_| Path::new("-"));
    let own = below
        .iter()
        .next()
        .unwrap_or_else(|| OsStr::new("-"))
        .display();
    format!("ls -A /tmp | grep -vxF -e {own}")
}

#[test]
fn cluster_concurrent_execs_share_nothing() -> Result<()> {
    let name = "cluster_concurrent_execs_share_nothing";
    let Some(world) = exec_job::start_cluster(name, "20MB")? else {
        return Ok(());
    };
    for volume in ["v", "x"] {
        let args = ["volume", "create", volume, "--node", "n1", "--size", "1MB"];
        world.run_json(&args)?;
    }
    let list = list_tmp();
    let script = &format!("echo $$; {list} | wc -l; echo x > /tmp/note; sleep 1; {list}");
    let jobs = ["v:/vol", "x:/vol"]
        .map(|mount| exec_job::job_command_with_mount(&world, mount, &[], script));
    let mut started = Vec::new();
    for mut job in jobs {
        started.push(job.spawn()?);
    }
    let mut ids = BTreeSet::new();
    for job in started {
        let output = job.wait_with_output()?;
        check_success(&output)?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (id, rest) = text.split_once('\n').context("an id")?;
        ensure!(rest == "0\nnote\n", "{text}");
        ensure!(ids.insert(id.to_owned()), "both are {id}");
    }
    let own = tempfile::tempdir()?;
    fs::write(own.path().join("file"), "of the host")?;
    let script = format!("cat \"$HERE/file\"; test -d {}", own.path().display());
    let mut shared = exec_job::job_command(&world, &["--share", "/tmp"], &script);
    let output = shared.env("HERE", own.path()).output()?;
    check_success(&output)?;
    Ok(())
}
