//! `bafs config`, `bafs completions`, `bafs man-pages`: what the program says of its own options.

use std::collections::BTreeMap;
use std::fs;
use std::io;

use anyhow::{Context, Result};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory};
use serde::Serialize;

use crate::args::{Cli, CompletionsArgs, ConfigArgs, ManPagesArgs, UsageError};
use crate::config::{self, Configuration};
use crate::output::{Printer, print_bytes};

/// An option with its value.
#[derive(Debug, Serialize)]
struct Setting {
    /// `catalog`, or `command.node.slots` for an option of one command.
    key: String,
    value: Option<String>,
    /// The variable, the file, `option` or `default`.
    source: String,
}

/// Shows values with where each is from.
pub(crate) fn show_config(args: &ConfigArgs, output: Printer) -> Result<()> {
    let command = Cli::command();
    let files = Configuration::load(&command).map_err(UsageError::from_reason)?;
    let settings = match args.words.is_empty() {
        true => list_settings(&command, &files),
        false => list_command_settings(&files, &args.words)?,
    };
    let key_width = settings.iter().map(|it| it.key.len()).max().unwrap_or(0);
    let shown = |it: &Setting| it.value.clone().unwrap_or_else(|| "-".to_owned());
    let value_width = settings.iter().map(|it| shown(it).len()).max().unwrap_or(0);
    let lines = settings.iter().map(|it| {
        let value = shown(it);
        format!("{:key_width$}  {value:value_width$}  {}", it.key, it.source)
    });
    let lines: Vec<_> = lines.collect();
    output.print_result(&lines.join("\n"), &settings)
}

/// All shared keys, and the keys of commands that a file sets.
fn list_settings(command: &Command, files: &Configuration) -> Vec<Setting> {
    let mut shared: BTreeMap<String, Setting> = BTreeMap::new();
    let mut own = Vec::new();
    config::visit_options(command, "", &mut |path, arg| {
        if let Some(variable) = arg.get_env() {
            let variable = variable.to_string_lossy();
            let key = config::key_of_variable(&variable);
            // Any command will do that has no own value.
            let value = files.value_of("", arg);
            shared
                .entry(key.clone())
                .or_insert_with(|| setting_without_command(key, &variable, arg, value));
        }
        let value = files.value_of(path, arg);
        if let Some(value) = value.filter(|it| Some(*it) != files.value_of("", arg)) {
            let long = arg.get_long().unwrap_or_default();
            own.push(Setting {
                key: format!("command.{}.{long}", path.replace(' ', ".")),
                value: Some(value.texts.join(" ")),
                source: value.file.display().to_string(),
            });
        }
    });
    shared.into_values().chain(own).collect()
}

fn setting_without_command(
    key: String,
    variable: &str,
    arg: &Arg,
    value: Option<&config::FileValue>,
) -> Setting {
    let default = arg.get_default_values().first();
    let (value, source) = match (std::env::var(variable), value) {
        (Ok(text), _) => (Some(text), variable.to_owned()),
        (Err(_), Some(value)) => (
            Some(value.texts.join(" ")),
            value.file.display().to_string(),
        ),
        (Err(_), None) => (
            default.map(|text| text.to_string_lossy().into_owned()),
            "default".to_owned(),
        ),
    };
    Setting { key, value, source }
}

/// The options of one command, as these words, the environment and the files set them.
fn list_command_settings(files: &Configuration, words: &[String]) -> Result<Vec<Setting>> {
    let command = relax(files.set_defaults(Cli::command()));
    let words = std::iter::once("bafs").chain(words.iter().map(String::as_str));
    let parsed = command.clone().try_get_matches_from(words);
    let matches = parsed.map_err(|error| UsageError::from_reason(error.render()))?;
    let (mut command, mut matches, mut path) = (&command, &matches, String::new());
    while let Some((name, below)) = matches.subcommand() {
        command = command
            .find_subcommand(name)
            .context("clap knows its subcommand")?;
        matches = below;
        path = format!("{path} {name}").trim_start().to_owned();
    }
    let mut settings = Vec::new();
    config::visit_options(command, &path, &mut |at, arg| {
        if at == path {
            settings.push(setting_of_matches(files, &path, arg, matches));
        }
    });
    Ok(settings)
}

/// A command without its required words.
fn relax(command: Command) -> Command {
    let groups: Vec<_> = command.get_groups().map(|it| it.get_id().clone()).collect();
    let command = groups.into_iter().fold(command, |command, id| {
        command.mut_group(id, |group| group.required(false))
    });
    command
        .mut_args(|arg| arg.required(false))
        .mut_subcommands(relax)
}

fn setting_of_matches(
    files: &Configuration,
    path: &str,
    arg: &Arg,
    matches: &ArgMatches,
) -> Setting {
    let id = arg.get_id().as_str();
    let values = matches.get_raw(id).map(|values| {
        let texts = values.map(|text| text.to_string_lossy().into_owned());
        texts.collect::<Vec<_>>().join(" ")
    });
    let source = match matches.value_source(id) {
        Some(ValueSource::CommandLine) => "option".to_owned(),
        Some(ValueSource::EnvVariable) => {
            let name = arg.get_env().unwrap_or_default();
            name.to_string_lossy().into_owned()
        }
        _ => match files.value_of(path, arg) {
            Some(value) => value.file.display().to_string(),
            None => "default".to_owned(),
        },
    };
    Setting {
        key: arg.get_long().unwrap_or(id).to_owned(),
        value: values,
        source,
    }
}

/// Prints the completions of a shell.
pub(crate) fn print_completions(args: &CompletionsArgs) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "bafs", &mut text);
    print_bytes(&text)
}

/// Writes the manual pages, one for each command.
pub(crate) fn write_man_pages(args: &ManPagesArgs, output: Printer) -> Result<()> {
    let directory = &args.directory;
    let attempt = || format!("write manual pages into {}", directory.display());
    fs::create_dir_all(directory).with_context(attempt)?;
    let written = write_pages(directory, Cli::command()).with_context(attempt)?;
    let text = format!("{written} manual pages are in {}", directory.display());
    output.print_result(&text, &serde_json::json!({ "pages": written }))
}

fn write_pages(directory: &std::path::Path, mut root: Command) -> io::Result<usize> {
    root.build();
    let (mut left, mut written) = (vec![(root, "bafs".to_owned())], 0);
    while let Some((command, name)) = left.pop() {
        for below in command.get_subcommands() {
            if !below.is_hide_set() && below.get_name() != "help" {
                left.push((below.clone(), format!("{name}-{}", below.get_name())));
            }
        }
        let mut page = Vec::new();
        let titled = command.display_name(name.clone());
        clap_mangen::Man::new(titled).render(&mut page)?;
        fs::write(directory.join(format!("{name}.1")), page)?;
        written += 1;
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_words(words: &str) -> Vec<Setting> {
        let words: Vec<_> = words.split(' ').map(str::to_owned).collect();
        list_command_settings(&Configuration::default(), &words).expect("valid words")
    }

    #[test]
    fn command_settings_name_their_source() {
        let found = of_words("node --slots 4");
        let of = |key: &str| found.iter().find(|it| it.key == key).expect(key);
        let slots = of("slots");
        assert_eq!(
            (slots.value.as_deref(), &*slots.source),
            (Some("4"), "option")
        );
        let grace = of("grace");
        assert_eq!(
            (grace.value.as_deref(), &*grace.source),
            (Some("25s"), "default")
        );
        assert!(
            found
                .iter()
                .all(|it| it.key != "until-stdin" && it.key != "json")
        );
    }

    #[test]
    fn required_words_may_be_missing() {
        for words in ["run", "sim", "exec", "volume create", "pool add"] {
            assert!(!of_words(words).is_empty(), "{words}");
        }
    }

    #[test]
    fn every_command_has_a_man_page() {
        let directory = tempfile::tempdir().expect("a directory");
        let written = write_pages(directory.path(), Cli::command()).expect("pages");
        let page = fs::read_to_string(directory.path().join("bafs-volume-create.1"));
        let page = page.expect("the page of a nested command");
        assert!(
            page.contains("volume") && page.contains("SYNOPSIS"),
            "{page}"
        );
        assert!(written > 30 && !directory.path().join("bafs-agent.1").exists());
    }
}
