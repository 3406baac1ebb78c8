//! `bafs import`: a file of another workflow system becomes a workflow file, and a container image
//! a directory. Runs nothing.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use bafs_import::{
    FileRole, ImportError, ImportedWorkflow, RoleTotal, Sources, TaskGraph, TextOptions,
    read_dagman, read_makeflow, read_wfformat, write_workflow,
};
use bafs_workflow::{DESCRIPTION_BYTES_MAX, FILE_BYTES_MAX};

use crate::args::{ImportArgs, ImportCommand, UsageError, WfformatArgs};
use crate::image;
use crate::input_file;
use crate::output::{self, Printer, print_notice};
use crate::units::format_bytes;

/// Imports a file.
pub(crate) fn run_import(command: &ImportCommand, output: Printer) -> Result<ExitCode> {
    match command {
        ImportCommand::Image(args) => image::import_image(args, output)?,
        ImportCommand::Wfformat(args) => import_wfformat(args, output)?,
        ImportCommand::Dagman(args) => import_file(args, read_dagman, output)?,
        ImportCommand::Makeflow(args) => import_file(args, read_makeflow, output)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn import_wfformat(args: &WfformatArgs, output: Printer) -> Result<()> {
    if args
        .stand_in
        .is_some_and(|share| !(0.0..=1_000.0).contains(&share))
    {
        return Err(UsageError::from_reason(
            "--stand-in is a number from 0 to 1000, such as 0.01",
        ));
    }
    let text = input_file::read_text(&args.import.file, FILE_BYTES_MAX)?;
    let graph = read_wfformat(&text).map_err(|error| explain(&args.import, &error))?;
    let written = write_graph(&args.import, &graph, args.stand_in)?;
    if let Some(path) = &args.trace {
        let trace = written.trace.as_deref();
        let trace = trace.context("--trace: the file lacks run times or sizes")?;
        write_file(path, trace, args.import.force)?;
    }
    finish(&args.import, &graph, &written, output)
}

fn import_file(
    args: &ImportArgs,
    read: fn(&str, &dyn Sources) -> Result<TaskGraph, ImportError>,
    output: Printer,
) -> Result<()> {
    let text = input_file::read_text(&args.file, FILE_BYTES_MAX)?;
    let directory = args.file.parent().map(Path::to_owned).unwrap_or_default();
    let graph = read(&text, &Directory(directory)).map_err(|error| explain(args, &error))?;
    let written = write_graph(args, &graph, None)?;
    finish(args, &graph, &written, output)
}

/// The files beside the imported one.
struct Directory(PathBuf);

impl Sources for Directory {
    fn read(&self, path: &str) -> Result<String, String> {
        let text = input_file::read_text(&self.0.join(path), DESCRIPTION_BYTES_MAX);
        text.map_err(|error| format!("{error:#}"))
    }

    fn size(&self, path: &str) -> Option<u64> {
        let found = fs::metadata(self.0.join(path)).ok()?;
        match found.is_dir() {
            true => Some(directory_bytes(&self.0.join(path))),
            false => Some(found.len()),
        }
    }

    fn is_directory(&self, path: &str) -> bool {
        self.0.join(path).is_dir()
    }
}

/// Bytes of the files below a directory. Links count as nothing.
fn directory_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => directory_bytes(&entry.path()),
        Ok(found) if found.is_file() => found.len(),
        _ => 0,
    });
    sizes.sum()
}

fn explain(args: &ImportArgs, error: &ImportError) -> anyhow::Error {
    let place = error
        .line
        .map_or_else(String::new, |line| format!(":{line}"));
    anyhow!("{}{place}: {}", args.file.display(), error.message)
}

fn write_graph(
    args: &ImportArgs,
    graph: &TaskGraph,
    stand_in: Option<f64>,
) -> Result<ImportedWorkflow> {
    let options = TextOptions {
        home: format!("{}/", args.home.trim_end_matches('/')),
        stand_in,
    };
    let written = write_workflow(graph, &options).map_err(|error| explain(args, &error))?;
    let target = target_of(args);
    match output::is_stdout(&target) {
        true => output::print_bytes(written.text.as_bytes())?,
        false => write_file(&target, &written.text, args.force)?,
    }
    Ok(written)
}

fn target_of(args: &ImportArgs) -> PathBuf {
    let default = || {
        let mut name = args.file.clone().into_os_string();
        name.push(".bafs");
        name.into()
    };
    args.output.clone().unwrap_or_else(default)
}

fn write_file(path: &Path, text: &str, is_forced: bool) -> Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).truncate(true);
    match is_forced {
        true => options.create(true),
        false => options.create_new(true),
    };
    let attempt = || {
        format!(
            "write {} (--force replaces an existing file)",
            path.display()
        )
    };
    let mut file = options.open(path).with_context(attempt)?;
    file.write_all(text.as_bytes()).with_context(attempt)
}

/// Says what was imported: roles on standard output, losses on standard error.
fn finish(
    args: &ImportArgs,
    graph: &TaskGraph,
    written: &ImportedWorkflow,
    output: Printer,
) -> Result<()> {
    for remark in &written.remarks {
        print_notice(remark);
    }
    let target = target_of(args);
    if output::is_stdout(&target) {
        return Ok(());
    }
    let roles = graph.total_roles();
    let mut text = format!("{}: {} jobs", target.display(), graph.count_tasks());
    for total in &roles {
        text.push_str(&describe_role(total));
    }
    let json = serde_json::json!({
        "workflow": target, "jobs": graph.count_tasks(), "roles": roles,
        "remarks": written.remarks,
    });
    output.print_result(&text, &json)
}

fn describe_role(total: &RoleTotal) -> String {
    let (name, meaning) = match total.role {
        FileRole::Batch => ("batch", "cached near the jobs"),
        FileRole::Pipeline => ("pipeline", "stay on the nodes"),
        FileRole::Endpoint => (
            "endpoint",
            "first inputs and last outputs, cross the link once",
        ),
    };
    let (files, bytes) = (total.files, format_bytes(total.bytes.into()));
    format!("\n  {name:9} {files:6} files {bytes:>10}  {meaning}")
}
