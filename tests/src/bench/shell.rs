//! A shell, in a job or on the host, in which a benchmark runs its programs: all use the same
//! mount.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::measure::Stopwatch;
use crate::TestCluster;

/// Longest time for one line or one program: a slower one hangs, and the benchmark continues
/// without it.
const RUN_TIMEOUT: Duration = Duration::from_secs(600);

/// Longest time for a shell to exit on request.
const END_TIMEOUT: Duration = Duration::from_secs(10);

const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A shell that waits for lines.
pub(super) struct Shell {
    child: Child,
    input: Option<ChildStdin>,
    /// Lines of its output, from a thread of their own, because a pipe has no read timeout.
    output: Receiver<String>,
}

/// Runs a program that prints little to its end.
///
/// # Errors
/// When it does not start, or hangs.
pub(super) fn run_program(command: &mut Command) -> Result<Output> {
    let command = command.stdin(Stdio::null());
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if !has_ended_within(&mut child, RUN_TIMEOUT)? {
        // Processes that wait for a hanging file system still do so after this.
        child.kill()?;
        bail!("{command:?} hangs");
    }
    Ok(child.wait_with_output()?)
}

fn has_ended_within(child: &mut Child, longest: Duration) -> Result<bool> {
    let watch = Stopwatch::start();
    while child.try_wait()?.is_none() {
        if watch.elapsed() > longest {
            return Ok(false);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(true)
}

impl Shell {
    /// Starts one in a job with a volume, as `bafs exec --mount` calls it.
    pub(super) fn start_in_job(world: &TestCluster, mount: &str) -> Result<Self> {
        let mut exec = world.bafs_command(&["exec", "--mount", mount, "--share"]);
        // The directories beside which it measures are there.
        exec.arg(std::env::temp_dir());
        Self::start(exec.args(["--", "/bin/sh"]))
    }

    /// Starts one on the host.
    pub(super) fn start_on_host() -> Result<Self> {
        Self::start(&mut Command::new("/bin/sh"))
    }

    fn start(command: &mut Command) -> Result<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        let printed = child.stdout.take().context("standard output is piped")?;
        let (lines, output) = mpsc::channel();
        std::thread::spawn(move || {
            let printed = BufReader::new(printed).lines();
            // The receiver is gone after the shell was abandoned.
            let _ = printed
                .map_while(Result::ok)
                .try_for_each(|line| lines.send(line));
        });
        Ok(Self {
            child,
            input,
            output,
        })
    }

    /// Runs a line, and returns its standard output.
    ///
    /// # Errors
    /// When the shell ends, or the line hangs: nothing can be run after that.
    pub(super) fn run_line(&mut self, line: &str) -> Result<String> {
        const END_MARKER: &str = "--end-of-command--";
        let input = self.input.as_mut().context("the shell lives")?;
        writeln!(input, "{line}; echo {END_MARKER}")?;
        input.flush()?;
        let mut said = String::new();
        let watch = Stopwatch::start();
        loop {
            let left = RUN_TIMEOUT.saturating_sub(watch.elapsed());
            match self.output.recv_timeout(left) {
                Ok(printed) => match printed.strip_suffix(END_MARKER) {
                    // The last line of a command need not end.
                    Some(last) => return Ok(said + last),
                    None => said = said + &printed + "\n",
                },
                Err(RecvTimeoutError::Timeout) => bail!("'{line}' hangs: {said}"),
                Err(RecvTimeoutError::Disconnected) => bail!("the job's shell ended: {said}"),
            }
        }
    }

    /// Runs fio, which must move so many bytes by reading or by writing: MB/s.
    pub(super) fn run_fio(&mut self, options: &str, bytes: u64) -> Result<f64> {
        let said = self.run_line(&format!("fio --output-format=json {options} 2>/dev/null"))?;
        let found: serde_json::Value = serde_json::from_str(&said).context(said)?;
        let job = &found["jobs"][0];
        let part = |way: &str, field: &str| job[way][field].as_u64().unwrap_or(0);
        let moved = part("read", "io_bytes") + part("write", "io_bytes");
        ensure!(moved == bytes, "fio moved {moved} bytes: {job}");
        // In whole milliseconds, a flush at the end included.
        let ms = part("read", "runtime") + part("write", "runtime");
        ensure!(ms > 0, "too short to be measured: {job}");
        Ok(bytes as f64 / ms as f64 * 1e3 / 1e6)
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // It ends with its standard input.
        drop(self.input.take());
        if !has_ended_within(&mut self.child, END_TIMEOUT).unwrap_or(true) {
            // Its program hangs; removing the mounts frees it.
            let _ = self.child.kill();
        }
    }
}
