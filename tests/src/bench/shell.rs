//! A shell, in a job or on the host, which a benchmark tells what to run: everything uses the same
//! mount.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::World;

/// A shell that waits for lines.
pub(super) struct Shell {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Shell {
    /// Starts one in a job with a volume, as `bafs exec --mount` calls it.
    pub(super) fn job(world: &World, mount: &str) -> Result<Self> {
        Self::start(&mut world.bafs(&["exec", "--mount", mount, "--", "/bin/sh"]))
    }

    /// Starts one on the host.
    pub(super) fn host() -> Result<Self> {
        Self::start(&mut Command::new("/bin/sh"))
    }

    fn start(command: &mut Command) -> Result<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        let output = child.stdout.take().context("standard output is piped")?;
        let output = BufReader::new(output);
        Ok(Self {
            child,
            input,
            output,
        })
    }

    /// Runs a line, and returns what it printed on standard output.
    pub(super) fn run(&mut self, line: &str) -> Result<String> {
        const END: &str = "--end-of-command--";
        let input = self.input.as_mut().context("the shell lives")?;
        writeln!(input, "{line}; echo {END}")?;
        input.flush()?;
        let mut said = String::new();
        while !said.ends_with(&format!("{END}\n")) {
            let read = self.output.read_line(&mut said)?;
            ensure!(read > 0, "the job's shell ended: {said}");
        }
        said.truncate(said.len() - END.len() - 1);
        Ok(said)
    }

    /// Runs fio, which must move so many bytes by reading or by writing: MB/s.
    pub(super) fn fio(&mut self, options: &str, bytes: u64) -> Result<f64> {
        let said = self.run(&format!("fio --output-format=json {options} 2>/dev/null"))?;
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
        let _ = self.child.wait();
    }
}
