//! A shell in a job, which a benchmark tells what to run: everything uses the same mount.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use anyhow::{Context, Result, ensure};

use crate::stage::Stage;

/// A shell in a job with the volume at `/data`.
pub(super) struct Shell {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Shell {
    /// Starts the job.
    pub(super) fn start(stage: &Stage, volume: &str) -> Result<Self> {
        let mount = format!("{volume}:/data:ro");
        let mut child = stage
            .world
            .bafs(&["exec", "--mount", &mount, "--", "/bin/sh"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
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

    /// Runs fio, which must move so many bytes by reading: MB/s.
    pub(super) fn fio(&mut self, options: &str, bytes: usize) -> Result<f64> {
        let said = self.run(&format!("fio --output-format=json {options} 2>/dev/null"))?;
        let found: serde_json::Value = serde_json::from_str(&said).context(said)?;
        let read = &found["jobs"][0]["read"];
        ensure!(
            read["io_bytes"].as_u64() == Some(bytes as u64),
            "fio read {read}"
        );
        // In whole milliseconds.
        let seconds = read["runtime"].as_f64().context("fio tells the time")? / 1e3;
        ensure!(seconds > 0.0, "too short to be measured: {read}");
        Ok(bytes as f64 / seconds / 1e6)
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // It ends with its standard input.
        drop(self.input.take());
        let _ = self.child.wait();
    }
}
