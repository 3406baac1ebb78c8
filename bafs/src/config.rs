//! The configuration file `bafs.toml`: values for options that are neither on the command line nor
//! in the environment. It becomes the defaults of clap's options; nothing else reads it.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Command};
use toml::Spanned;

/// Variable that names the only file to read; if it is empty, none is read.
pub(crate) const FILE_VARIABLE: &str = "BAFS_CONFIG";

/// The file of the machine. That of the user comes before it.
const SYSTEM_FILE: &str = "/etc/bafs/bafs.toml";

/// Below the user's configuration directory.
const USER_FILE: &str = "bafs/bafs.toml";

/// The table of tables that hold options of one command each.
const COMMAND_TABLE: &str = "command";

/// Bytes of a file; a larger one is no configuration.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What variables of options begin with. The rest, in small letters, is the key of a file.
const VARIABLE_PREFIX: &str = "BAFS_";

/// A value with the file that it is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileValue {
    /// One text for each time that the option is given.
    pub(crate) texts: Vec<String>,
    /// The file.
    pub(crate) file: PathBuf,
}

/// All values of the files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Configuration {
    /// By variable, for every command that reads the variable.
    shared: BTreeMap<String, FileValue>,
    /// By command, such as `pool add`, and name of the option.
    own: BTreeMap<(String, String), FileValue>,
}

type Table = BTreeMap<Spanned<String>, Spanned<toml::Value>>;

/// A line of a file that does not count, and why.
type Fault = (Option<usize>, String);

impl Configuration {
    /// Reads the files of this process. The text of an error is for the user.
    pub(crate) fn load(command: &Command) -> Result<Self, String> {
        let mut all = Self::default();
        for file in list_files() {
            let Some(text) = read_file(&file)? else {
                continue;
            };
            all.add_file(&file, &text, command)?;
        }
        Ok(all)
    }

    /// Adds the values of a file. Those of earlier files stay.
    fn add_file(&mut self, file: &Path, text: &str, command: &Command) -> Result<(), String> {
        self.add_values(file, text, command)
            .map_err(|(line, why)| match line {
                Some(line) => format!("{}:{line}: {why}", file.display()),
                None => format!("{}: {why}", file.display()),
            })
    }

    fn add_values(&mut self, file: &Path, text: &str, command: &Command) -> Result<(), Fault> {
        let line_of = |start: usize| Some(1 + text[..start].matches('\n').count());
        let table: Table = toml::from_str(text).map_err(|error| {
            let line = error.span().and_then(|span| line_of(span.start));
            (line, error.message().to_owned())
        })?;
        let keys = list_shared_keys(command);
        for (key, value) in table {
            let line = line_of(key.span().start);
            let at_line = |why| (line, why);
            let (key, value) = (key.into_inner(), value.into_inner());
            if key == COMMAND_TABLE {
                self.add_commands(file, "", value, command)
                    .map_err(|why| (None, why))?;
                continue;
            }
            if !keys.contains(&key) {
                let known = keys.iter().map(String::as_str).chain([COMMAND_TABLE]);
                return Err(at_line(describe_unknown("key", &key, known)));
            }
            let texts = read_value(&key, &value).map_err(at_line)?;
            let entry = self.shared.entry(variable_of_key(&key));
            entry.or_insert_with(|| new_value(texts, file));
        }
        Ok(())
    }

    /// Adds the values below `[command]`. `path` is the command so far, such as `pool`.
    fn add_commands(
        &mut self,
        file: &Path,
        path: &str,
        value: toml::Value,
        command: &Command,
    ) -> Result<(), String> {
        let shown = format!(
            "[{}]",
            format!("{COMMAND_TABLE} {path}")
                .trim_end()
                .replace(' ', ".")
        );
        let toml::Value::Table(table) = value else {
            return Err(format!("{shown} is not a table"));
        };
        for (key, value) in table {
            let subcommand = command.find_subcommand(&key).filter(|it| !it.is_hide_set());
            let names = || command.get_arguments().filter(|arg| is_settable(arg));
            let is_option = names().any(|arg| arg.get_long() == Some(&key));
            if let Some(below) = subcommand.filter(|_| value.is_table() || !is_option) {
                let path = format!("{path} {key}");
                self.add_commands(file, path.trim_start(), value, below)?;
                continue;
            }
            if !is_option {
                let commands = command.get_subcommands().filter(|it| !it.is_hide_set());
                let known = names().filter_map(Arg::get_long);
                let known = known.chain(commands.map(Command::get_name));
                return Err(format!("{shown}: {}", describe_unknown("key", &key, known)));
            }
            let texts = read_value(&key, &value).map_err(|why| format!("{shown}: {why}"))?;
            let entry = self.own.entry((path.to_owned(), key));
            entry.or_insert_with(|| new_value(texts, file));
        }
        Ok(())
    }

    /// The value of an option of a command; an own value counts before a shared one.
    pub(crate) fn value_of(&self, path: &str, arg: &Arg) -> Option<&FileValue> {
        let long = arg.get_long().filter(|_| is_settable(arg))?;
        let own = self.own.get(&(path.to_owned(), long.to_owned()));
        let variable = arg.get_env().and_then(|name| name.to_str());
        own.or_else(|| self.shared.get(variable?))
    }

    /// The text of a variable that no command line is about.
    pub(crate) fn shared_text(&self, variable: &str) -> Option<String> {
        self.shared.get(variable)?.texts.first().cloned()
    }

    /// Makes the values the defaults of the options. Hidden commands are started by others, which
    /// give them all options.
    pub(crate) fn set_defaults(&self, command: Command) -> Command {
        self.set_defaults_below(command, "")
    }

    fn set_defaults_below(&self, command: Command, path: &str) -> Command {
        if command.is_hide_set() {
            return command;
        }
        let command = command.mut_args(|arg| match self.value_of(path, &arg) {
            Some(value) => arg
                .required(false)
                .default_values(value.texts.iter().map(OsString::from)),
            None => arg,
        });
        command.mut_subcommands(|below| {
            let path = format!("{path} {}", below.get_name());
            self.set_defaults_below(below, path.trim_start())
        })
    }

    /// The file that a refused value of an option may be from.
    pub(crate) fn file_of_value(&self, option: &str, text: &str) -> Option<&Path> {
        let own = self
            .own
            .iter()
            .map(|((_, long), value)| (long.clone(), value));
        let shared = self
            .shared
            .iter()
            .map(|(name, value)| (key_of_variable(name), value));
        let mut named = own.chain(shared).filter(|(long, value)| {
            option.trim_start_matches('-').starts_with(long.as_str())
                && value.texts.iter().any(|it| it == text)
        });
        named.next().map(|(_, value)| value.file.as_path())
    }
}

fn new_value(texts: Vec<String>, file: &Path) -> FileValue {
    FileValue {
        texts,
        file: file.to_owned(),
    }
}

/// The files to read, the first before the others.
pub(crate) fn list_files() -> Vec<PathBuf> {
    if let Some(only) = env::var_os(FILE_VARIABLE) {
        let named = Some(PathBuf::from(only)).filter(|path| !path.as_os_str().is_empty());
        return named.into_iter().collect();
    }
    let set = env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let set = set.filter(|directory| directory.is_absolute());
    let user = set.or_else(|| Some(home_directory()?.join(".config")));
    let user = user.map(|directory| directory.join(USER_FILE));
    user.into_iter().chain([SYSTEM_FILE.into()]).collect()
}

/// Whether options may be in a file: one is there, or cannot be looked for, or the user named one.
pub(crate) fn has_configuration_files() -> bool {
    let is_named = env::var_os(FILE_VARIABLE).is_some_and(|name| !name.is_empty());
    let mut files = list_files().into_iter();
    is_named || files.any(|file| !matches!(file.try_exists(), Ok(false)))
}

fn home_directory() -> Option<PathBuf> {
    let home = env::var_os("HOME").map(PathBuf::from);
    home.filter(|directory| directory.is_absolute())
}

/// The text of a file; nothing if there is none, unless the user named it.
fn read_file(file: &Path) -> Result<Option<String>, String> {
    let is_named = env::var_os(FILE_VARIABLE).is_some();
    let failed = |error| format!("cannot read {}: {error}", file.display());
    // Who acts for another user may keep a `HOME` that is closed to this one.
    let is_absence = |kind| matches!(kind, ErrorKind::NotFound | ErrorKind::PermissionDenied);
    let opened = match File::open(file) {
        Ok(opened) => opened,
        Err(error) if !is_named && is_absence(error.kind()) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    // Devices have no length, and may have no end.
    let mut text = Vec::new();
    let read = opened.take(FILE_BYTES_MAX + 1).read_to_end(&mut text);
    read.map_err(failed)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("{} is larger than 1 MiB", file.display()));
    }
    let text = String::from_utf8(text);
    text.map(Some)
        .map_err(|_| format!("{} is not UTF-8", file.display()))
}

/// Whether the words name a hidden command. A server starts it for its own work and gives it all
/// options, so that a file that its user changes meanwhile must not change or end it.
pub(crate) fn is_hidden_command(command: &Command, words: &[OsString]) -> bool {
    let mut level = command;
    for word in words {
        let below = word.to_str().and_then(|word| level.find_subcommand(word));
        match below {
            Some(below) if below.is_hide_set() => return true,
            Some(below) => level = below,
            None => return false,
        }
    }
    false
}

/// Whether a file may set an option: it has a long name and is not the program's own.
fn is_settable(arg: &Arg) -> bool {
    let has_value =
        arg.get_action().takes_values() || matches!(arg.get_action(), ArgAction::SetTrue);
    arg.get_long().is_some() && !arg.is_hide_set() && has_value && arg.get_id() != "json"
}

/// The keys outside tables: one for each variable that an option reads.
pub(crate) fn list_shared_keys(command: &Command) -> Vec<String> {
    let mut keys: Vec<String> = Vec::new();
    visit_options(command, "", &mut |_, arg| {
        if let Some(variable) = arg.get_env().and_then(|name| name.to_str()) {
            keys.push(key_of_variable(variable));
        }
    });
    keys.sort();
    keys.dedup();
    keys
}

/// Calls `visit` with each option that a file may set, and its command.
pub(crate) fn visit_options(command: &Command, path: &str, visit: &mut dyn FnMut(&str, &Arg)) {
    if command.is_hide_set() {
        return;
    }
    let options = command.get_arguments().filter(|arg| is_settable(arg));
    options.for_each(|arg| visit(path, arg));
    for below in command.get_subcommands() {
        let path = format!("{path} {}", below.get_name());
        visit_options(below, path.trim_start(), visit);
    }
}

/// `agent-memory` for `BAFS_AGENT_MEMORY`.
pub(crate) fn key_of_variable(variable: &str) -> String {
    let name = variable.strip_prefix(VARIABLE_PREFIX).unwrap_or(variable);
    name.to_ascii_lowercase().replace('_', "-")
}

fn variable_of_key(key: &str) -> String {
    format!(
        "{VARIABLE_PREFIX}{}",
        key.to_ascii_uppercase().replace('-', "_")
    )
}

/// The texts of a value, as they would be typed.
fn read_value(key: &str, value: &toml::Value) -> Result<Vec<String>, String> {
    let one = |value: &toml::Value| match value {
        toml::Value::String(text) => Ok(expand_home(text)),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Float(number) => Ok(number.to_string()),
        toml::Value::Boolean(is_set) => Ok(is_set.to_string()),
        _ => Err(format!(
            "'{key}' is neither text, number, true, false nor a list of these"
        )),
    };
    match value {
        toml::Value::Array(values) => values.iter().map(one).collect(),
        value => Ok(vec![one(value)?]),
    }
}

/// A `~/` at the beginning is the home directory of the user, as in a shell.
fn expand_home(text: &str) -> String {
    let below = text.strip_prefix("~/").zip(home_directory());
    below.map_or_else(
        || text.to_owned(),
        |(rest, home)| home.join(rest).to_string_lossy().into_owned(),
    )
}

/// An unknown name, with the nearest known one.
fn describe_unknown<'k>(what: &str, name: &str, known: impl Iterator<Item = &'k str>) -> String {
    /// As similar as clap's own suggestions must be.
    const SIMILARITY_MIN: f64 = 0.7;
    let scored = known.map(|it| (strsim::jaro_winkler(name, it), it));
    let best = scored
        .filter(|(score, _)| *score > SIMILARITY_MIN)
        .max_by(|(a, _), (b, _)| a.total_cmp(b));
    match best {
        Some((_, nearest)) => format!("unknown {what} '{name}'; did you mean '{nearest}'?"),
        None => format!("unknown {what} '{name}'; `bafs config` lists the keys"),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    fn read(text: &str) -> Result<Configuration, String> {
        let mut all = Configuration::default();
        all.add_file(Path::new("b.toml"), text, &Cli::command())?;
        Ok(all)
    }

    /// The texts and source of an option of a command line.
    fn parse(text: &str, words: &str, option: &str) -> Vec<String> {
        let command = read(text).expect(text).set_defaults(Cli::command());
        let words = std::iter::once("bafs").chain(words.split(' '));
        let mut matches = command.try_get_matches_from(words).expect("valid words");
        while let Some((_, below)) = matches.remove_subcommand() {
            matches = below;
        }
        let values = matches.get_raw(option).into_iter().flatten();
        values.map(|it| it.to_string_lossy().into_owned()).collect()
    }

    const NODE: &str = "identity = '/c'\nlisten = '10.0.0.2:7002'\n\
                        [command.node]\nstore = '/s'\nsize = '1GB'\nslots = 4\n\
                        attribute = ['disk=ssd', 'has_gpu=true']\n";

    #[test]
    fn file_supplies_required_options() {
        assert_eq!(parse(NODE, "node", "identity"), ["/c"]);
        assert_eq!(parse(NODE, "node", "slots"), ["4"]);
        assert_eq!(
            parse(NODE, "node", "attributes"),
            ["disk=ssd", "has_gpu=true"]
        );
    }

    #[test]
    fn options_override_the_file() {
        let words = "node --slots 2 --attribute disk=nvme";
        assert_eq!(parse(NODE, words, "slots"), ["2"]);
        assert_eq!(parse(NODE, words, "attributes"), ["disk=nvme"]);
    }

    #[test]
    fn own_value_overrides_the_shared_one() {
        let text = "metrics = '127.0.0.1:1'\n[command.home]\nmetrics = '127.0.0.1:2'\n";
        let home = "home --identity c --export d";
        assert_eq!(parse(text, home, "metrics"), ["127.0.0.1:2"]);
        assert_eq!(
            parse(text, "catalog --identity c", "metrics"),
            ["127.0.0.1:1"]
        );
    }

    #[test]
    fn unknown_keys_name_the_nearest() {
        let refused = |text: &str| read(text).expect_err(text);
        let said = refused("\ncatalogue = 'x'\n");
        assert_eq!(
            said,
            "b.toml:2: unknown key 'catalogue'; did you mean 'catalog'?"
        );
        let said = refused("[command.node]\nslot = 3\n");
        assert!(
            said.ends_with("[command.node]: unknown key 'slot'; did you mean 'slots'?"),
            "{said}"
        );
        let said = refused("[command.nodes]\nslots = 3\n");
        assert!(said.contains("did you mean 'node'?"), "{said}");
        assert!(refused("[command.agent]\nmemory = 3\n").contains("unknown"));
        let said = refused("[command]\nrun = 3\n");
        assert_eq!(said, "b.toml: [command.run] is not a table");
        assert!(refused("catalog = \n").starts_with("b.toml:1: "));
    }

    #[test]
    fn first_file_overrides_later_ones() {
        let mut all = read("catalog = 'user:1'").expect("valid");
        let system = "catalog = 'system:1'\nidentity = '/c'";
        all.add_file(Path::new("s.toml"), system, &Cli::command())
            .expect("valid");
        let of = |variable: &str| all.shared[variable].texts[0].clone();
        assert_eq!(
            (of("BAFS_CATALOG"), of("BAFS_IDENTITY")),
            ("user:1".into(), "/c".into())
        );
    }

    #[test]
    fn hidden_commands_are_known_by_name() {
        let is_hidden = |words: &str| {
            let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
            is_hidden_command(&Cli::command(), &words)
        };
        assert!(is_hidden("agent --socket s") && is_hidden("pool pilot /p n"));
        assert!(!is_hidden("run agent") && !is_hidden("pool add") && !is_hidden("--json agent"));
    }

    #[test]
    fn hidden_commands_ignore_the_file() {
        let command = read("memory = '1MiB'")
            .expect("valid")
            .set_defaults(Cli::command());
        let default = |name: &str| {
            let command = command.find_subcommand(name).expect(name);
            let mut options = command.get_arguments();
            let memory = options
                .find(|arg| arg.get_id() == "memory")
                .expect("memory");
            memory.get_default_values()[0]
                .to_string_lossy()
                .into_owned()
        };
        assert_eq!(
            (default("exec"), default("agent")),
            ("1MiB".into(), "256MiB".into())
        );
    }
}
