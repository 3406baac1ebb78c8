//! The command lines that begin a job, apart from all others: clap makes every option of every
//! command before it reads a word, which takes a job half a millisecond. Errors and help are the
//! whole command line's.

use std::ffi::OsString;

use clap::{Parser, Subcommand};

use super::{AgentArgs, Cli, CliCommand, ExecArgs, GlobalArgs};
use crate::config::has_configuration_files;

#[derive(Debug, Parser)]
#[command(name = "bafs")]
struct JobCli {
    #[command(flatten)]
    global: GlobalArgs,

    #[command(subcommand)]
    command: JobCommand,
}

#[derive(Debug, Subcommand)]
enum JobCommand {
    Agent(AgentArgs),
    Exec(ExecArgs),
}

impl Cli {
    /// Parses `bafs agent` and `bafs exec`. Nothing where the words are of another command, or are
    /// wrong, or where options may be in a file.
    pub(super) fn parse_job_command(words: &[OsString]) -> Option<Self> {
        let reads_files = match words.get(1)?.to_str()? {
            // Nodes start it, and give it all options.
            "agent" => false,
            "exec" => true,
            _ => return None,
        };
        if reads_files && has_configuration_files() {
            return None;
        }
        let JobCli { global, command } = JobCli::try_parse_from(words).ok()?;
        let command = match command {
            JobCommand::Agent(args) => CliCommand::Agent(args),
            JobCommand::Exec(args) => CliCommand::Exec(args),
        };
        Some(Self { global, command })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn job_commands_parse_as_in_the_whole() {
        for text in [
            "bafs agent --identity /i --memory 1MB --spawner",
            "bafs agent --identity /i --temporary-directory /t --shared-memory 1MB --json",
        ] {
            let whole = Cli::try_parse_from(words(text)).expect(text);
            let alone = Cli::parse_job_command(&words(text)).expect(text);
            assert_eq!(format!("{alone:?}"), format!("{whole:?}"));
        }
        let text = "bafs exec --identity /i --catalog h:1 --channel tcp --mount v:/a \
                    --mount w:/b:ro -- true --json";
        let whole = Cli::try_parse_from(words(text)).expect(text);
        // A file of this user may have options.
        if let Some(alone) = Cli::parse_job_command(&words(text)) {
            assert_eq!(format!("{alone:?}"), format!("{whole:?}"));
        }
    }

    #[test]
    fn other_words_are_for_the_whole() {
        for text in [
            "bafs",
            "bafs exec",
            "bafs exec --help",
            "bafs --json exec -- true",
            "bafs run w",
        ] {
            assert!(Cli::parse_job_command(&words(text)).is_none(), "{text}");
        }
    }
}
