//! `bafs fmt`: workflow files in the usual layout.

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use bafs_workflow::{FILE_BYTES_MAX, format_workflow};
use serde_json::json;

use crate::args::FmtArgs;
use crate::input_file;
use crate::locked_directory::explain_full_disk;
use crate::output::{self, Printer};

/// Runs the command.
pub(crate) fn run(args: &FmtArgs, output: Printer) -> Result<ExitCode> {
    let mut changed = Vec::new();
    for path in &args.files {
        let text = match output::is_stdout(path) {
            true => read_stdin()?,
            false => input_file::read_text(path, FILE_BYTES_MAX)?,
        };
        let name = path.to_string_lossy();
        let formatted = match format_workflow(&name, &text) {
            Ok(formatted) => formatted,
            Err(rejected) => bail!("{rejected}\n{name} is left as it is"),
        };
        if output::is_stdout(path) && !args.check {
            output::print_bytes(formatted.as_bytes())?;
            continue;
        }
        if formatted == text {
            continue;
        }
        changed.push(name.into_owned());
        if !args.check {
            replace_file(path, &formatted)?;
        }
    }
    if changed.is_empty() && !output.is_json() {
        return Ok(ExitCode::SUCCESS);
    }
    let text = match args.check {
        true => changed
            .iter()
            .map(|name| format!("{name} has another form")),
        false => return report(&changed, output),
    };
    let text = text.collect::<Vec<_>>().join("\n");
    output.print_result(&text, &json!({ "changed": changed }))?;
    Ok(match changed.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn report(changed: &[String], output: Printer) -> Result<ExitCode> {
    let text = changed.join("\n");
    output.print_result(&text, &json!({ "changed": changed }))?;
    Ok(ExitCode::SUCCESS)
}

fn read_stdin() -> Result<String> {
    let mut text = String::new();
    let limited = std::io::stdin().lock().take(FILE_BYTES_MAX as u64);
    std::io::BufReader::new(limited)
        .read_to_string(&mut text)
        .context("cannot read standard input")?;
    Ok(text)
}

/// Replaces a file whole or not at all, with the permissions that it has.
fn replace_file(path: &Path, text: &str) -> Result<()> {
    // A link stays one.
    let path = path.canonicalize()?;
    let directory = path.parent().context("a file has a directory")?;
    let replaced = || -> Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        std::io::Write::write_all(&mut file, text.as_bytes())?;
        file.as_file()
            .set_permissions(path.metadata()?.permissions())?;
        file.persist(&path)?;
        Ok(())
    };
    replaced()
        .map_err(|error| explain_full_disk(directory, error))
        .with_context(|| format!("cannot write {}", path.display()))
}
