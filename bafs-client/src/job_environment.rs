//! What a job has around it beside its volumes: variables, and which of the host's temporary files
//! it sees. Starts nothing.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use bafs_proto::message::JobCommand;
use bafs_proto::path::ROOT_PATH;

use crate::agent::TemporaryLocation;
use crate::sandbox::{
    TEMPORARY_VARIABLES, TemporaryDirectories, VolumeBind, find_named_paths, job_environment,
};

/// Where programs put temporary files if nobody says otherwise.
const TEMPORARY_DIRECTORY: &str = "/tmp";

/// Variables that a job keeps in a root of its own: who runs it, how it speaks, and its proxies.
const ROOT_VARIABLES: [&str; 11] = [
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TERM",
    "http_proxy",
    "https_proxy",
    "ftp_proxy",
    "no_proxy",
];

/// What the job asks for wins over what it inherits, and over what we add.
pub(crate) fn build_environment(
    command: &JobCommand,
    job: &str,
    volumes: &[VolumeBind],
    temporary: Option<&TemporaryLocation>,
) -> Vec<(OsString, OsString)> {
    let has_root = volumes
        .iter()
        .any(|volume| volume.path == Path::new(ROOT_PATH));
    let inherited = std::env::vars_os().filter(|(name, _)| !has_root || is_kept_in_root(name));
    let mut environment = job_environment(inherited, job, volumes);
    if temporary.is_some()
        && !command
            .shared_directories
            .iter()
            .any(|path| path == TEMPORARY_DIRECTORY)
    {
        // What this process inherited names a directory that jobs would share.
        let is_ours = |name: &OsString| TEMPORARY_VARIABLES.iter().any(|known| name == known);
        environment.retain(|(name, _)| !is_ours(name));
        environment.push((TEMPORARY_VARIABLES[0].into(), TEMPORARY_DIRECTORY.into()));
    }
    environment.retain(|(name, _)| {
        name.to_str()
            .is_none_or(|name| !command.environment.contains_key(name))
    });
    let own = command.environment.iter();
    environment.extend(own.map(|(name, value)| (name.into(), value.into())));
    environment
}

/// Whether a variable of this machine means the same in another root: most name its directories.
fn is_kept_in_root(name: &OsStr) -> bool {
    let is_named = |known: &&str| name.eq_ignore_ascii_case(known);
    ROOT_VARIABLES.iter().any(is_named) || name.as_encoded_bytes().starts_with(b"LC_")
}

/// The job's own directories, and what of the host's its description names.
pub(crate) fn collect_temporary_directories(
    location: &TemporaryLocation,
    command: &JobCommand,
    environment: &[(OsString, OsString)],
) -> TemporaryDirectories {
    let mut words = vec![&command.executable, &command.directory];
    words.extend(&command.arguments);
    words.extend(command.stdout.iter().chain(&command.stderr));
    // Who starts in `/tmp` itself may name what is there without saying where.
    let directory = Path::new(&command.directory);
    let relative = words.iter().map(|word| directory.join(word));
    let relative: Vec<_> = relative.map(PathBuf::into_os_string).collect();
    // Where its volumes are is not what it has of the host's, nor is where its node was started.
    let is_other = |name: &OsString| {
        name.as_encoded_bytes().starts_with(b"BAFS_") || name == "PWD" || name == "OLDPWD"
    };
    let values = environment.iter().filter(|(name, _)| !is_other(name));
    let words = words
        .into_iter()
        .map(OsStr::new)
        .chain(relative.iter().map(OsString::as_os_str))
        .chain(values.map(|(_, value)| value.as_os_str()));
    TemporaryDirectories {
        directory: location.directory.clone(),
        memory_bytes: location.memory_bytes,
        shared_directories: command.shared_directories.iter().cloned().collect(),
        named_paths: find_named_paths(words, Path::is_dir),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn temporary_location() -> TemporaryLocation {
        TemporaryLocation {
            directory: "/store/temporary/1".into(),
            memory_bytes: 1,
        }
    }

    #[test]
    fn tmpdir_is_the_private_tmp() {
        let tmpdir = |command: &JobCommand| {
            let found = build_environment(command, "j", &[], Some(&temporary_location()));
            let mut values = found.into_iter().filter(|(name, _)| name == "TMPDIR");
            let value = values.next_back().map(|(_, value)| value);
            assert_eq!(values.next(), None);
            value
        };
        assert_eq!(tmpdir(&JobCommand::default()), Some("/tmp".into()));
        let mut own = JobCommand::default();
        own.environment.insert("TMPDIR".into(), "/scratch".into());
        assert_eq!(tmpdir(&own), Some("/scratch".into()));
        let shared = JobCommand {
            shared_directories: vec![TEMPORARY_DIRECTORY.to_owned()],
            ..JobCommand::default()
        };
        assert_eq!(tmpdir(&shared), std::env::var_os("TMPDIR"));
    }

    #[test]
    fn relative_paths_name_entries_of_tmp() {
        let command = JobCommand {
            executable: "./tool".into(),
            directory: TEMPORARY_DIRECTORY.into(),
            ..JobCommand::default()
        };
        let named = collect_temporary_directories(&temporary_location(), &command, &[]).named_paths;
        assert!(named.contains(&"/tmp/./tool".into()), "{named:?}");
        let mounted = [("BAFS_V".into(), "/tmp/work".into())];
        let named =
            collect_temporary_directories(&temporary_location(), &JobCommand::default(), &mounted)
                .named_paths;
        assert!(named.is_empty(), "{named:?}");
    }
}
