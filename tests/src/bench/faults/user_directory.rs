//! A directory in which a user runs `bafs`, and the output of the program. Judges nothing.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::bafs_program;
use crate::bench::measure::Stopwatch;

/// A program that takes longer hangs.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(100);

/// How a program ended.
#[derive(Debug)]
pub(super) struct CommandResult {
    /// Its exit code; none if a signal ended it.
    pub(super) exit_code: Option<i32>,
    /// Its output, including errors.
    pub(super) output: String,
}

impl CommandResult {
    /// That it ended with this code.
    pub(super) fn check_code(&self, code: i32) -> Result<()> {
        ensure!(
            self.exit_code == Some(code),
            "exit code {:?} instead of {code}: {}",
            self.exit_code,
            last_lines(&self.output)
        );
        Ok(())
    }

    /// Asserts that its output contains a text, or does not.
    pub(super) fn has_text(&self, text: &str) -> bool {
        self.output.contains(text)
    }
}

/// The end of a program's output, in one line.
pub(super) fn last_lines(said: &str) -> String {
    const LINES: usize = 3;
    let lines: Vec<&str> = said.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join(" | ")
}

/// A user's directory.
#[derive(Debug)]
pub(super) struct UserDirectory {
    directory: TempDir,
}

impl UserDirectory {
    /// A new one. It is beside the program and not in `/tmp`, of which jobs may have their own.
    pub(super) fn new() -> Result<Self> {
        let program = bafs_program();
        let beside = program.parent().context("a program is in a directory")?;
        let mut builder = tempfile::Builder::new();
        builder.prefix("directory-");
        Ok(Self {
            directory: builder.tempdir_in(beside)?,
        })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The directory as a word of a script.
    pub(super) fn shell_word(&self) -> String {
        self.directory.path().to_string_lossy().into_owned()
    }

    /// Writes a file.
    pub(super) fn write_file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.path(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(&path, text)?;
        Ok(path)
    }

    /// The trimmed content of a file; empty if it is missing.
    pub(super) fn read_file(&self, name: &str) -> String {
        let bytes = std::fs::read(self.path(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }

    /// Runs `bafs` here to its end.
    pub(super) fn run_bafs(&self, args: &[&str]) -> Result<CommandResult> {
        self.run_to_end(Command::new(bafs_program()).args(args))
    }

    /// Runs a workflow on a throw-away cluster here, with a journal `journal`.
    pub(super) fn run_workflow(&self, workflow: &str, options: &[&str]) -> Result<CommandResult> {
        self.write_file("test.bafs", workflow)?;
        let own = ["run", "test.bafs", "--journal", "journal"];
        self.run_bafs(&[&own[..], options].concat())
    }

    /// Runs a program here to its end.
    pub(super) fn run_to_end(&self, command: &mut Command) -> Result<CommandResult> {
        let told = self.path("told");
        let mut child = self.start_command(command, &told)?;
        let ended = wait_or_kill(&mut child, PROGRAM_TIMEOUT);
        let said = std::fs::read(&told)?;
        let said = String::from_utf8_lossy(&said).into_owned();
        match ended? {
            Some(code) => Ok(CommandResult {
                exit_code: code,
                output: said,
            }),
            None => anyhow::bail!("no end after {PROGRAM_TIMEOUT:?}: {}", last_lines(&said)),
        }
    }

    /// Starts a program here; its output goes to a file.
    pub(super) fn start_command(&self, command: &mut Command, told: &Path) -> Result<Child> {
        let told = File::create(told)?;
        command
            .current_dir(self.directory.path())
            .stdin(Stdio::null())
            .stdout(told.try_clone()?)
            .stderr(told)
            .process_group(0);
        command.spawn().with_context(|| format!("{command:?}"))
    }
}

/// Waits so long for a program at most, and then kills it and its group.
pub(super) fn wait_or_kill(child: &mut Child, limit: Duration) -> Result<Option<Option<i32>>> {
    let watch = Stopwatch::start();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.code()));
        }
        if watch.elapsed() > limit {
            let group = Pid::from_raw(i32::try_from(child.id())?);
            let _ = killpg(group, Signal::SIGTERM);
            std::thread::sleep(Duration::from_secs(2));
            let _ = killpg(group, Signal::SIGKILL);
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(30));
    }
}
