//! Runs commands of batch systems with a time limit. Parses nothing.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::EngineError;

/// Longest wait for one command. Without a controller, `squeue` of Slurm 22.05 gives up after 9 s.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);

/// Pause between two looks at a running command.
const POLL_PAUSE: Duration = Duration::from_millis(5);

/// Most characters of an error text or an answer that an error repeats.
const SAID_CHARACTERS_MAX: usize = 300;

/// Most bytes of an answer: a queue of 100,000 jobs takes 60 bytes for each of them as XML lines.
const OUTPUT_BYTES_MAX: u64 = 256 << 20;

/// How commands are run.
#[derive(Debug, Clone)]
pub struct EngineCommands {
    /// Environment variables beside those of this process.
    pub environment: Vec<(String, String)>,
    /// Longest wait for one command.
    pub timeout: Duration,
}

impl Default for EngineCommands {
    fn default() -> Self {
        Self {
            environment: Vec::new(),
            timeout: TIMEOUT_DEFAULT,
        }
    }
}

/// What a command printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandOutput {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) is_success: bool,
}

impl EngineCommands {
    /// Runs a program that must succeed, and returns what it printed.
    pub(crate) fn run(
        &self,
        program: &str,
        arguments: &[String],
        input: &str,
    ) -> Result<String, EngineError> {
        let output = self.run_for_output(program, arguments, input)?;
        if output.is_success {
            return Ok(output.stdout);
        }
        Err(EngineError::Failed {
            command: program.to_owned(),
            said: last_line(&output.stderr),
        })
    }

    /// Runs a program that may fail.
    pub(crate) fn run_for_output(
        &self,
        program: &str,
        arguments: &[String],
        input: &str,
    ) -> Result<CommandOutput, EngineError> {
        let mut child = Command::new(program)
            .args(arguments)
            // What a server of this machine listens at is not for those of another.
            .env_remove("BAFS_LISTEN")
            .env_remove("BAFS_METRICS")
            .env("LC_ALL", "C")
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| EngineError::NotStarted {
                command: program.to_owned(),
                reason: error.to_string(),
            })?;
        let stdin = child.stdin.take();
        let input = input.to_owned();
        thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(input.as_bytes())));
        let stdout = read_in_background(child.stdout.take());
        let stderr = read_in_background(child.stderr.take());
        let is_success = self.wait_for_end(&mut child, program)?;
        // A grandchild may keep a pipe open for ever: then its text does not matter.
        let text = |pipe: mpsc::Receiver<String>| pipe.recv_timeout(self.timeout);
        Ok(CommandOutput {
            stdout: text(stdout).unwrap_or_default(),
            stderr: text(stderr).unwrap_or_default(),
            is_success,
        })
    }

    fn wait_for_end(&self, child: &mut Child, program: &str) -> Result<bool, EngineError> {
        let mut waited = Duration::ZERO;
        loop {
            if let Ok(Some(status)) = child.try_wait() {
                return Ok(status.success());
            }
            if waited >= self.timeout {
                let _ = child.kill();
                let _ = child.wait();
                return Err(EngineError::TimedOut {
                    command: program.to_owned(),
                    seconds: self.timeout.as_secs(),
                });
            }
            thread::sleep(POLL_PAUSE);
            waited += POLL_PAUSE;
        }
    }
}

fn read_in_background(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            let _ = pipe.take(OUTPUT_BYTES_MAX).read_to_end(&mut bytes);
        }
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

/// The last line with text.
pub(crate) fn last_line(text: &str) -> String {
    let mut lines = text.lines().map(str::trim);
    shorten(lines.rfind(|line| !line.is_empty()).unwrap_or_default())
}

/// The beginning of a text, for an error.
pub(crate) fn shorten(text: &str) -> String {
    text.chars().take(SAID_CHARACTERS_MAX).collect()
}

/// Words of a command line.
pub(crate) fn words(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_shell(text: &str, timeout: Duration) -> Result<String, EngineError> {
        let commands = EngineCommands {
            environment: vec![("GREETING".to_owned(), "hello".to_owned())],
            timeout,
        };
        commands.run("sh", &words(&["-c", text]), "of the input")
    }

    #[test]
    fn command_gets_input_and_environment() {
        let printed = run_shell("echo $GREETING; cat", Duration::from_secs(10));
        assert_eq!(printed, Ok("hello\nof the input".to_owned()));
    }

    #[test]
    fn failed_command_tells_its_last_words() {
        let failed = run_shell(
            "echo a >&2; echo 'the end' >&2; exit 3",
            Duration::from_secs(10),
        );
        let said = failed.expect_err("it fails").to_string();
        assert_eq!(said, "sh failed: the end");
    }

    #[test]
    fn silent_command_is_killed() {
        let failed = run_shell("exec sleep 60", Duration::from_millis(50));
        assert!(
            matches!(failed, Err(EngineError::TimedOut { .. })),
            "{failed:?}"
        );
    }

    #[test]
    fn missing_program_is_named() {
        let failed = EngineCommands::default().run("no-such-program", &[], "");
        let said = failed.expect_err("it is missing").to_string();
        assert!(said.contains("no-such-program"), "{said}");
    }
}
