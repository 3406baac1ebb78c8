//! Jobs with a volume `v` at `/vol`, run by `bafs exec`: to their end, or until they are disturbed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{TestCluster, mount_obstacle, printed_text, report_skip};

/// A cluster of one node of this size; `None` where a test must skip itself.
///
/// # Errors
/// The failure to start.
pub fn start_cluster(test: &str, size: &str) -> Result<Option<TestCluster>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(test, &reason);
        return Ok(None);
    }
    let world = TestCluster::start(&[size])?;
    world.wait_for_servers(2)?;
    Ok(Some(world))
}

/// A job that runs a script in a shell.
pub fn job_command(world: &TestCluster, options: &[&str], script: &str) -> Command {
    job_command_with_mount(world, "v:/vol", options, script)
}

/// As `job`, with the volume mounted with the options of `mount`.
pub fn job_command_with_mount(
    world: &TestCluster,
    mount: &str,
    options: &[&str],
    script: &str,
) -> Command {
    let mut args = vec!["exec", "--explain", "--mount", mount];
    args.extend(options);
    args.extend(["--", "/bin/sh", "-ec", script]);
    let mut command = world.bafs_command(&args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a job, which must succeed and print this; its volume must be reached in this `way`.
///
/// # Errors
/// The first difference.
pub fn check_job(
    world: &TestCluster,
    options: &[&str],
    way: &str,
    script: &str,
    expected: &str,
) -> Result<()> {
    check_command(job_command(world, options, script), way, script, expected)
}

/// As [`check_job`], of a job that is given.
///
/// # Errors
/// The first difference.
pub fn check_command(mut job: Command, way: &str, script: &str, expected: &str) -> Result<()> {
    let output = job.output().context("bafs exec runs")?;
    let found = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "{script}: {}",
        printed_text(&output)
    );
    ensure!(
        found.trim() == expected,
        "{script}: {}",
        printed_text(&output)
    );
    ensure!(printed_text(&output).contains(way), printed_text(&output));
    Ok(())
}

/// Writes one large piece after the other directly behind the end of a file: each is one write of
/// many requests, of which the kernel sends several at once, and they must stay in order.
///
/// # Errors
/// The first difference.
pub fn check_direct_appends(world: &TestCluster, way: &str) -> Result<()> {
    let script = "cd /vol; head -c 12M /dev/urandom > a; for turn in 1 2 3; do rm -f b; \
        dd if=a of=b bs=6M oflag=append,direct conv=notrunc 2>/dev/null; cmp a b; done; echo same";
    check_job(world, &[], way, script, "same")
}

/// Has processes open, make and remove the same few names at once: every call behaves as in a
/// directory of the host.
///
/// # Errors
/// The first difference.
pub fn check_name_races(world: &TestCluster, way: &str) -> Result<()> {
    let script = "cd /vol; mkdir races; cd races; \
        write() { i=0; while [ $i -lt 600 ]; do i=$((i+1)); \
            for n in a b c; do echo x >> $n || echo \"append $n\"; done; done; }; \
        unlink() { i=0; while [ $i -lt 300 ]; do i=$((i+1)); rm -f a b c || echo rm; done; }; \
        replace() { i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo $i > new; mv new old; done; }; \
        read() { i=0; while [ $i -lt 600 ]; do i=$((i+1)); cat old > /dev/null || echo cat; \
            done; }; \
        : > old; write & write & unlink & unlink & replace & read & read & wait; echo over";
    check_job(world, &[], way, script, "over")
}

/// A job that has printed `ready` and runs on.
#[derive(Debug)]
pub struct ExecJob(Child);

impl ExecJob {
    /// Starts it.
    ///
    /// # Errors
    /// When it does not say so.
    pub fn start(world: &TestCluster, options: &[&str], script: &str) -> Result<Self> {
        Self::from_command(job_command(world, options, script))
    }

    /// As [`Self::start`], of a job that is given.
    ///
    /// # Errors
    /// When it does not say so.
    pub fn from_command(mut job: Command) -> Result<Self> {
        let mut child = job.spawn()?;
        let stdout = child.stdout.take().context("its output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        if line.trim() != "ready" {
            let _ = child.kill();
            anyhow::bail!(
                "it said {line:?}, {}",
                printed_text(&child.wait_with_output()?)
            );
        }
        Ok(Self(child))
    }

    /// Sends its agent a signal.
    ///
    /// # Errors
    /// When it is gone.
    pub fn send_signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(i32::try_from(self.0.id())?), signal)?;
        Ok(())
    }

    /// Waits for its end, which comes within seconds, and returns its output.
    ///
    /// # Errors
    /// When it does not end.
    pub fn wait_for_end(mut self) -> Result<Output> {
        for _ in 0..200 {
            if self.0.try_wait()?.is_some() {
                return Ok(self.0.wait_with_output()?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.0.kill()?;
        anyhow::bail!(
            "the job goes on: {}",
            printed_text(&self.0.wait_with_output()?)
        )
    }
}
