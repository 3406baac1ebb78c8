//! Environment variables that were renamed. An old name sets its option if the new name is unset,
//! until version 0.2. Help texts and the reference show only the new names.

use clap::error::ContextKind;
use clap::{Arg, Command, CommandFactory, FromArgMatches};

use super::{Cli, EXIT_USAGE_ERROR};
use crate::config::{Configuration, is_hidden_command};

/// New and old name of each renamed variable.
const RENAMED_VARIABLES: [(&str, &str); 1] = [("BAFS_OPERATION_TIMEOUT", "BAFS_OP_DEADLINE")];

impl Cli {
    /// Parses the arguments of this process and its environment. Exits on a usage error; that of a
    /// volume command with `--json` goes to `print_json` first.
    pub(crate) fn from_process(print_json: fn(&str)) -> Self {
        let is_set = |name: &str| std::env::var_os(name).is_some();
        let words: Vec<_> = std::env::args_os().collect();
        let has_old_variables = RENAMED_VARIABLES.iter().any(|(_, old)| is_set(old));
        if let (false, Some(cli)) = (has_old_variables, Self::parse_job_command(&words)) {
            return cli;
        }
        let command = accept_old_variables(Self::command(), &is_set);
        let words = words.get(1..).unwrap_or_default();
        let files = match is_hidden_command(&command, words) {
            true => Configuration::default(),
            false => Configuration::load(&command)
                .unwrap_or_else(|why| exit_without_files(command.clone(), &why)),
        };
        let mut command = files.set_defaults(command);
        let mut matches = command.clone().try_get_matches().unwrap_or_else(|error| {
            if wants_json(&command, &error) {
                let text = error.render().to_string();
                print_json(text.trim().trim_start_matches("error: "));
            }
            exit_with_source(&error, &files)
        });
        Self::from_arg_matches_mut(&mut matches)
            .unwrap_or_else(|error| error.format(&mut command).exit())
    }
}

/// Whether wrong words are of a volume command whose failures are for programs.
fn wants_json(command: &Command, error: &clap::Error) -> bool {
    if !error.use_stderr() {
        return false;
    }
    // Of wrong words only those before the mistake are understood.
    let understood = command.clone().ignore_errors(true).try_get_matches();
    let is_volume = understood.is_ok_and(|it| it.subcommand_name() == Some("volume"));
    let mut words = std::env::args_os().take_while(|word| word != "--");
    is_volume && words.any(|word| word == "--json")
}

/// Helps whoever asks for help or the version, and tells others why a file cannot be read.
fn exit_without_files(command: Command, why: &str) -> ! {
    let refused = command.try_get_matches().err();
    eprintln!("bafs: {why}");
    if let Some(help) = refused.filter(|error| !error.use_stderr()) {
        help.exit()
    }
    std::process::exit(EXIT_USAGE_ERROR.into())
}

/// Prints why the words are refused, with the file if the refused value is from there.
fn exit_with_source(error: &clap::Error, files: &Configuration) -> ! {
    let text = |kind| error.get(kind).map(ToString::to_string);
    let refused = text(ContextKind::InvalidArg).zip(text(ContextKind::InvalidValue));
    let file = refused.and_then(|(option, value)| files.file_of_value(&option, &value));
    if let Some(file) = file {
        eprintln!("bafs: {}: this value may be from there:", file.display());
    }
    error.exit()
}

/// Lets options of the command and of its subcommands read old variables where only these are set.
fn accept_old_variables(command: Command, is_set: &dyn Fn(&str) -> bool) -> Command {
    command
        .mut_args(|arg| accept_old_variable(arg, is_set))
        .mut_subcommands(|subcommand| accept_old_variables(subcommand, is_set))
}

fn accept_old_variable(arg: Arg, is_set: &dyn Fn(&str) -> bool) -> Arg {
    let renamed = RENAMED_VARIABLES
        .iter()
        .find(|(new, _)| arg.get_env().is_some_and(|name| name == *new));
    match renamed {
        Some((new, old)) if !is_set(new) && is_set(old) => arg.env(old),
        _ => arg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variable that the operation timeout of a subcommand reads.
    fn variable_of_timeout(subcommand: &str, set: &[&str]) -> String {
        let command = accept_old_variables(Cli::command(), &|name| set.contains(&name));
        let subcommand = command.find_subcommand(subcommand).unwrap();
        let mut options = subcommand.get_arguments();
        let timeout = options.find(|arg| arg.get_id() == "operation_timeout");
        let variable = timeout.unwrap().get_env().unwrap();
        variable.to_str().unwrap().to_owned()
    }

    #[test]
    fn old_variable_counts_while_the_new_is_unset() {
        for subcommand in ["mount", "exec"] {
            let variable = variable_of_timeout(subcommand, &["BAFS_OP_DEADLINE"]);
            assert_eq!(variable, "BAFS_OP_DEADLINE");
        }
    }

    #[test]
    fn new_variable_overrides_its_old_name() {
        let both = ["BAFS_OP_DEADLINE", "BAFS_OPERATION_TIMEOUT"];
        for set in [&both[..], &[]] {
            let variable = variable_of_timeout("exec", set);
            assert_eq!(variable, "BAFS_OPERATION_TIMEOUT");
        }
    }
}
