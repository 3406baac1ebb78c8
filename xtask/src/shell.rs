//! Starts other programs. Knows no command of ours and decides nothing.

use std::env;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};

/// Where programs of the system live when the caller's `PATH` leaves them out.
const SYSTEM_DIRECTORIES: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// Says of each line of a stream, in order, whether it is wanted.
pub(crate) type LineFilter = Box<dyn FnMut(&str) -> bool + Send>;

/// The root of this checkout.
pub(crate) fn checkout_root() -> PathBuf {
    // Cargo says at run time where the package is; the compiled-in path would be wrong in a copy.
    let package = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    package.parent().map(Path::to_path_buf).unwrap_or(package)
}

/// `cargo` with these arguments, at the root of the checkout.
pub(crate) fn cargo_command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(checkout_root());
    // `cargo run` describes xtask to us in these; passed on, they make build scripts that watch
    // them (ring's does) run again, and a whole tree is rebuilt each time.
    for (name, _) in env::vars_os() {
        if is_package_variable(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command
}

fn is_package_variable(name: &str) -> bool {
    name.starts_with("CARGO_PKG_")
        || [
            "CARGO_MANIFEST_DIR",
            "CARGO_MANIFEST_PATH",
            "CARGO_CRATE_NAME",
            "CARGO_BIN_NAME",
        ]
        .contains(&name)
}

/// Runs the command with our own input and output; fails when it fails.
pub(crate) fn run_command(command: &mut Command) -> Result<()> {
    print_command(command);
    let status = command
        .status()
        .with_context(|| format!("start {}", format_command(command)))?;
    check_status(command, status)
}

/// Runs the command, shows what it prints, and returns the lines that `keep` asks for.
///
/// Lines reach the terminal as they come; the kept ones are without colour.
pub(crate) fn run_and_capture(
    command: &mut Command,
    keep: fn() -> LineFilter,
) -> Result<(ExitStatus, Vec<String>)> {
    print_command(command);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {}", format_command(command)))?;
    let stdout = child
        .stdout
        .take()
        .context("take the output of the child")?;
    let stderr = child
        .stderr
        .take()
        .context("take the errors of the child")?;
    let (mut kept, kept_errors) = thread::scope(|scope| {
        let errors = scope.spawn(move || forward_lines(stderr, std::io::stderr(), keep()));
        (
            forward_lines(stdout, std::io::stdout(), keep()),
            errors.join().unwrap_or_default(),
        )
    });
    kept.extend(kept_errors);
    let status = child.wait().context("wait for the child")?;
    Ok((status, kept))
}

fn forward_lines(source: impl Read, mut target: impl Write, mut keep: LineFilter) -> Vec<String> {
    let mut reader = BufReader::new(source);
    let mut kept = Vec::new();
    let mut line = Vec::new();
    while matches!(reader.read_until(b'\n', &mut line), Ok(1..)) {
        // A closed terminal must not stop us from draining the child, or it would block.
        let _ = target.write_all(&line).and_then(|()| target.flush());
        let plain = strip_colour(String::from_utf8_lossy(&line).trim_end());
        if keep(&plain) {
            kept.push(plain);
        }
        line.clear();
    }
    kept
}

/// Whether the command ends well; what it prints is thrown away.
pub(crate) fn has_succeeded(command: &mut Command) -> bool {
    let silent = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    silent.status().is_ok_and(|status| status.success())
}

/// What the command prints on its standard output; fails when it fails.
pub(crate) fn run_for_output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("start {}", format_command(command)))?;
    check_status(command, output.status)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Shows a command line before it runs.
pub(crate) fn print_command(command: &Command) {
    println!("$ {}", format_command(command));
    let _ = std::io::stdout().flush();
}

fn check_status(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("`{}` failed: {status}", format_command(command));
    }
    Ok(())
}

fn format_command(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut words = vec![
        program
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
    ];
    for argument in command.get_args() {
        let word = argument.to_string_lossy();
        let plain = !word.is_empty() && !word.contains(|c: char| " |&;*()<>'\"$".contains(c));
        words.push(if plain {
            word.into_owned()
        } else {
            format!("'{word}'")
        });
    }
    words.join(" ")
}

/// Whether a program of this name can be started.
pub(crate) fn has_program(name: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(SYSTEM_DIRECTORIES.map(PathBuf::from))
        .any(|directory| {
            directory
                .join(name)
                .metadata()
                .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
        })
}

/// Whether we may do everything on this machine.
pub(crate) fn is_root() -> bool {
    // The owner of /proc/self is our effective user, as the kernel sees it.
    std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Whether a person is likely to watch.
pub(crate) fn is_terminal() -> bool {
    std::io::stderr().is_terminal()
}

/// The line without the colour codes that a terminal would eat.
fn strip_colour(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        if character == '\u{1b}' {
            characters.by_ref().find(|c| c.is_ascii_alphabetic());
        } else {
            plain.push(character);
        }
    }
    plain
}

/// The directory that cargo builds into.
pub(crate) fn target_directory() -> Result<PathBuf> {
    let metadata = read_metadata()?;
    let directory = metadata["target_directory"]
        .as_str()
        .context("read cargo's target directory")?;
    Ok(PathBuf::from(directory))
}

/// What cargo says about the workspace, without dependencies from the registry.
pub(crate) fn read_metadata() -> Result<serde_json::Value> {
    let mut command = cargo_command(&["metadata", "--no-deps", "--format-version", "1"]);
    serde_json::from_str(&run_for_output(&mut command)?).context("read what cargo metadata printed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_codes_are_removed() {
        assert_eq!(strip_colour("\u{1b}[32;1mok\u{1b}[0m done"), "ok done");
        assert_eq!(strip_colour("plain"), "plain");
    }

    #[test]
    fn only_package_variables_are_removed() {
        assert!(is_package_variable("CARGO_PKG_NAME"));
        assert!(is_package_variable("CARGO_MANIFEST_DIR"));
        assert!(!is_package_variable("CARGO_TARGET_DIR"));
        assert!(!is_package_variable("CARGO_HOME"));
    }

    #[test]
    fn command_lines_are_quoted_for_pasting() {
        let mut command = Command::new("/usr/bin/env");
        assert_eq!(
            format_command(command.args(["a", "b c", ""])),
            "env a 'b c' ''"
        );
    }

    #[test]
    fn programs_are_found_by_name() {
        assert!(has_program("sh"));
        assert!(!has_program("no-such-program-of-bafs"));
    }
}
