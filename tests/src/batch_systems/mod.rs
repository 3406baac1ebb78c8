//! Real batch systems for tests and benchmarks: private daemons in a temporary directory, ended
//! with their value. A batch system of the machine itself is never asked or changed.

mod grid_engine;
mod slurm;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub use grid_engine::{GridEngineCluster, grid_engine_obstacle};
pub use slurm::{
    ProcessTracking, SlurmCluster, SlurmOptions, has_burst_buffer_plugin, slurm_obstacle,
};

/// Time for a daemon to start, and for one to end before it is killed.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(20);

/// A daemon in the foreground, whose output is in a file.
#[derive(Debug)]
struct Daemon {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Daemon {
    fn start(name: &str, command: &mut Command, directory: &Path) -> Result<Self> {
        let log = directory.join(format!("{name}.out"));
        let output = File::options().create(true).append(true).open(&log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log,
        })
    }

    fn check_running(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let said = std::fs::read_to_string(&self.log).unwrap_or_default();
            bail!("{} ended with {status}: {}", self.name, last_lines(&said));
        }
        Ok(())
    }

    fn send_signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Asks it to end, and kills it when it does not.
    fn stop(&mut self) {
        self.send_signal(Signal::SIGTERM);
        if wait_until(DAEMON_TIMEOUT, || Ok(self.child.try_wait()?.is_some())).is_err() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

/// Waits until a condition holds.
///
/// # Errors
/// The condition's own error, or that it did not hold in time.
#[expect(clippy::disallowed_methods, reason = "a test waits for real daemons")]
pub fn wait_until(timeout: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    while !condition()? {
        ensure!(began.elapsed() < timeout, "not within {timeout:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Runs a command to its end, and returns its standard output.
///
/// # Errors
/// A failure, with what it said.
fn run(command: &mut Command) -> Result<String> {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{command:?}"))?;
    let said = String::from_utf8_lossy(&stderr);
    ensure!(status.success(), "{command:?}: {status}: {}", said.trim());
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// Which of these programs are not installed, as a reason to skip a test.
fn find_missing(programs: &[&str]) -> Option<String> {
    let missing: Vec<&str> = programs
        .iter()
        .copied()
        .filter(|path| !Path::new(path).exists())
        .collect();
    (!missing.is_empty()).then(|| {
        format!(
            "not installed: {}; `cargo xtask setup batch-systems` installs them",
            missing.join(" ")
        )
    })
}

/// Kills every process that has a text in its environment: what a batch job left.
fn kill_by_environment(text: &str) {
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else {
            continue;
        };
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let is_own = u32::try_from(pid) == Ok(std::process::id());
        if !is_own && String::from_utf8_lossy(&environment).contains(text) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}
