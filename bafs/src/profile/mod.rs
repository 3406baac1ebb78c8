//! `bafs profile`: traces commands or the jobs of a workflow, keeps the traces in a file, and
//! prints what they say. The analysis is crate `bafs-profile`, the tracer is in the agent.

mod commands;
mod lifetime_chart;
mod profile_file;
mod workflow_jobs;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use bafs_client::sandbox::{self, Sandbox};
use bafs_profile::report::analyse;
use bafs_profile::skeleton::write_skeleton;
use bafs_profile::tables::format_tables;

use crate::args::{ProfileArgs, UsageError};
use crate::output::{Printer, print_notice};

/// Runs `bafs profile`.
pub(crate) fn run_profile(args: &ProfileArgs, output: Printer) -> Result<ExitCode> {
    let mut traces = match args.new {
        true => Vec::new(),
        false => profile_file::read_traces(&args.profile)?,
    };
    let earlier = traces.len();
    let mut numbered = BTreeSet::new();
    match (&args.workflow, args.command.is_empty()) {
        (Some(workflow), _) => workflow_jobs::trace_jobs(workflow, args, &mut traces)?,
        (None, false) => numbered = commands::trace_commands(args, output, &mut traces)?,
        (None, true) if traces.is_empty() => {
            let shown = args.profile.display();
            return Err(UsageError::from_reason(format!(
                "{shown} has no traces; give a command after `--`, or a workflow"
            )));
        }
        (None, true) => {}
    }
    let failed = traces[earlier..].iter().find(|trace| trace.exit_code != 0);
    let failed = failed.map(|trace| trace.exit_code);
    if traces.len() > earlier || args.new {
        let own = traces.split_off(earlier);
        let before = if args.new { None } else { Some(traces) };
        traces = profile_file::add_traces(&args.profile, before, own, &numbered)?;
    }
    let report = analyse(&traces);
    if let Some(path) = &args.skeleton {
        let skeleton = write_skeleton(&traces);
        write_text(path, &skeleton.text)?;
        let export = skeleton.home.map(|home| format!(" --export {home}"));
        let shown = path.display();
        print_notice(&format!(
            "run the skeleton with: bafs run {shown} --local 2{}",
            export.unwrap_or_default()
        ));
    }
    if let Some(path) = &args.svg {
        write_text(path, &lifetime_chart::render_lifetimes(&report))?;
    }
    output.print_result(&format_tables(&report, args.files), &report)?;
    Ok(failed.map_or(ExitCode::SUCCESS, |code| ExitCode::from(code as u8)))
}

fn write_text(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Enters a private name space. The process must have one thread.
fn enter_sandbox() -> Result<Sandbox> {
    let privilege = sandbox::enter_private()?;
    Ok(Sandbox::prepare(privilege)?)
}
