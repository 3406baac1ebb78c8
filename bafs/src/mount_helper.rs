//! `mount.bafs`: what mount(8) starts for `mount -t bafs SOURCE DIR -o OPTIONS` and for lines of
//! fstab. It starts `bafs mount` in the background, and ends when the volume is mounted.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;
use std::{env, thread};

/// Name under which mount(8) looks for the helper.
const PROGRAM_NAME: &str = "mount.bafs";

/// Exit codes of mount(8): wrong words, and a mount that failed.
const EXIT_WRONG_WORDS: u8 = 1;
const EXIT_MOUNT_FAILED: u8 = 32;

/// Where the words of `bafs mount` have the directory.
const DIRECTORY_AT: usize = 2;

/// Pause between two looks whether the volume is mounted. The command itself has timeouts.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// Options for mount(8), systemd and the kernel that change nothing here.
const IGNORED_OPTIONS: &[&str] = &[
    "rw", "defaults", "auto", "noauto", "user", "nouser", "users", "owner", "group", "nofail",
    "_netdev", "exec", "suid", "dev", "nosuid", "nodev", "relatime", "noatime", "atime", "async",
];

/// Options with a value that `bafs mount` has, too.
const VALUE_OPTIONS: &[&str] = &[
    "identity",
    "catalog",
    "memory",
    "operation-timeout",
    "delegate",
    "channel",
];

/// Acts as the mount helper, if the program was started by that name.
pub(crate) fn dispatch() -> Option<ExitCode> {
    let mut words = env::args_os();
    let program = words.next()?;
    if Path::new(&program).file_name()? != PROGRAM_NAME {
        return None;
    }
    let words: Option<Vec<_>> = words.map(|word| word.into_string().ok()).collect();
    let planned = words
        .ok_or_else(|| "the words are not UTF-8".to_owned())
        .and_then(|words| plan_mount(&words));
    let code = match planned {
        Err(why) => {
            eprintln!("{PROGRAM_NAME}: {why}");
            EXIT_WRONG_WORDS
        }
        Ok(None) => 0,
        Ok(Some(arguments)) => match start_mount(&arguments) {
            Ok(()) => 0,
            Err(why) => {
                eprintln!("{PROGRAM_NAME}: {why}");
                EXIT_MOUNT_FAILED
            }
        },
    };
    Some(ExitCode::from(code))
}

/// The words of `bafs mount` for those of mount(8); nothing if mount(8) only pretends (`-f`).
fn plan_mount(words: &[String]) -> Result<Option<Vec<String>>, String> {
    let (mut places, mut options, mut is_fake) = (Vec::new(), Vec::new(), false);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "-o" => {
                let list = words.next().ok_or("-o needs options")?;
                options.extend(list.split(',').map(str::to_owned));
            }
            "-t" | "-N" => {
                words.next();
            }
            "-r" => options.push("ro".to_owned()),
            flags if flags.starts_with('-') => is_fake |= flags.contains('f'),
            place => places.push(place.to_owned()),
        }
    }
    let [source, directory] = places.as_slice() else {
        return Err("give [HOST:PORT/]VOLUME and a directory".to_owned());
    };
    let source = source
        .strip_prefix("bafs:")
        .unwrap_or(source)
        .trim_start_matches('/');
    let (catalog, volume) = match source.split_once('/') {
        Some((catalog, volume)) => (Some(catalog), volume),
        None => (None, source),
    };
    let mut arguments = vec!["mount".to_owned(), volume.to_owned(), directory.clone()];
    arguments.extend(catalog.map(|catalog| format!("--catalog={catalog}")));
    for option in options.iter().filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        match name {
            "ro" => arguments.push("--read-only".to_owned()),
            // A second mount would cover the first, which stays as it is.
            "remount" => return Err("a mount cannot change; unmount it, then mount it".to_owned()),
            "write-back" => arguments.push("--write-back".to_owned()),
            name if VALUE_OPTIONS.contains(&name) => arguments.push(format!("--{name}={value}")),
            name if IGNORED_OPTIONS.contains(&name) => {}
            name if name.starts_with("x-") || name == "comment" => {}
            name => {
                return Err(format!(
                    "unknown option '{name}'; `bafs mount --help` lists them"
                ));
            }
        }
    }
    Ok((!is_fake).then_some(arguments))
}

/// Starts the mount in a process group of its own, and waits until it stands.
fn start_mount(arguments: &[String]) -> Result<(), String> {
    let attempt = || {
        let program = env::current_exe()?;
        let said = tempfile::tempfile()?;
        let directory = Path::new(&arguments[DIRECTORY_AT]);
        // The device of the directory changes when something is mounted on it.
        let before = fs::metadata(directory)?.dev();
        let mut command = Command::new(program);
        command
            .arg0("bafs")
            .args(arguments)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said.try_clone()?)
            .process_group(0);
        let mut child = command.spawn()?;
        loop {
            if child.try_wait()?.is_some() {
                return Ok(Some(said));
            }
            if fs::metadata(directory).is_ok_and(|found| found.dev() != before) {
                return Ok(None);
            }
            thread::sleep(LOOK_PAUSE);
        }
    };
    match attempt() {
        Ok(None) => Ok(()),
        Ok(Some(mut said)) => Err(read_text(&mut said)),
        Err(error) => Err(io::Error::to_string(&error)),
    }
}

fn read_text(file: &mut File) -> String {
    let mut text = String::new();
    let _ = file.rewind();
    let _ = file.read_to_string(&mut text);
    let text = text.trim().trim_start_matches("bafs: ").to_owned();
    match text.is_empty() {
        true => "the volume could not be mounted".to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(words: &str) -> Result<Option<Vec<String>>, String> {
        let words: Vec<_> = words.split(' ').map(str::to_owned).collect();
        plan_mount(&words)
    }

    #[test]
    fn mount_options_become_options_of_bafs() {
        let words = "10.0.0.1:7000/work /mnt/w -s -o ro,_netdev,identity=/etc/bafs/c,x-systemd.a=b";
        let expected =
            "mount work /mnt/w --catalog=10.0.0.1:7000 --read-only --identity=/etc/bafs/c";
        let expected: Vec<_> = expected.split(' ').map(str::to_owned).collect();
        assert_eq!(plan(words), Ok(Some(expected)));
        let plain = ["mount", "work", "/w"].map(str::to_owned).to_vec();
        assert_eq!(plan("work /w -o rw,noauto"), Ok(Some(plain)));
        assert_eq!(plan("work /w -fn"), Ok(None));
    }

    #[test]
    fn unknown_mount_options_are_refused() {
        let said = plan("work /w -o rw,speed=9").expect_err("unknown");
        assert!(said.contains("unknown option 'speed'"), "{said}");
        assert!(plan("work").is_err());
        let said = plan("work /w -o remount,ro").expect_err("it would be a second mount");
        assert!(said.contains("unmount it"), "{said}");
    }
}
