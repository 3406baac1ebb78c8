//! The table of a report that has a line for each job: what it used, and where its logs are.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use bafs_sched::io::job_logs::LoggedAttempt;
use bafs_sched::timeline::ExecutionRecord;
use serde::Serialize;

use super::ReportData;
use super::page::{ROWS_MAX, format_seconds, write_omitted};
use crate::html_text::{encode_link, escape_html};
use crate::units::format_bytes;

/// What all attempts of a job used.
#[derive(Default)]
struct JobUse<'r> {
    attempts: usize,
    last: Option<&'r ExecutionRecord>,
    memory_bytes_max: u64,
    held_bytes_max: u64,
}

/// Writes a line for each job that ran.
pub(super) fn write_jobs(
    html: &mut String,
    report: &ReportData,
    directory: Option<&Path>,
) -> Result<()> {
    let timeline = &report.timeline;
    let mut uses: Vec<JobUse<'_>> = Vec::new();
    uses.resize_with(timeline.jobs.len(), JobUse::default);
    for execution in &timeline.executions {
        let used = &mut uses[execution.job.as_usize()];
        used.attempts += 1;
        used.last = Some(execution);
        used.memory_bytes_max = used.memory_bytes_max.max(execution.memory_bytes_max);
        used.held_bytes_max = used.held_bytes_max.max(execution.held_bytes);
    }
    *html += "<h2>Jobs</h2><p>Memory is that of the largest process of a job, and at least that of \
              the agent that starts it, about 18 MB. Space is what its volumes held when it \
              ended. Both are the largest of all attempts, the rest is of the last one.</p>\
              <table><tr><th>job</th><th>node</th>";
    for title in [
        "attempts", "wall, s", "CPU, s", "memory", "space", "read", "written",
    ] {
        write!(html, "<th class=\"n\">{title}</th>")?;
    }
    *html += "<th>logs</th></tr>";
    let ran = timeline.jobs.iter().zip(&uses);
    let ran: Vec<_> = ran
        .filter_map(|(job, used)| Some((job, used, used.last?)))
        .collect();
    for (job, used, last) in ran.iter().take(ROWS_MAX) {
        let (name, node) = (escape_html(&job.name), escape_html(&last.node));
        write!(html, "<tr><td>{name}</td><td>{node}</td>")?;
        let known = |bytes: u64| match bytes {
            0 => "–".to_owned(),
            bytes => format_bytes(bytes.into()),
        };
        for cell in [
            used.attempts.to_string(),
            format_seconds(last.wall_ms),
            format_seconds(last.cpu_ms),
            known(used.memory_bytes_max),
            known(used.held_bytes_max),
            known(last.read_bytes),
            known(last.written_bytes),
        ] {
            write!(html, "<td class=\"n\">{cell}</td>")?;
        }
        *html += "<td>";
        let last = report.logs_of(&job.name).next_back();
        write_links(html, last.into_iter(), directory)?;
        *html += "</td></tr>\n";
    }
    *html += "</table>";
    write_omitted(html, ran.len())
}

/// Links to what attempts printed, as far as it is kept.
pub(super) fn write_links<'l>(
    html: &mut String,
    logs: impl Iterator<Item = &'l JobLog>,
    directory: Option<&Path>,
) -> Result<()> {
    for log in logs {
        for (path, name) in [(&log.stdout, "stdout"), (&log.stderr, "stderr")] {
            let Some(path) = path else {
                continue;
            };
            let path = directory
                .and_then(|it| path.strip_prefix(it).ok())
                .unwrap_or(path.as_path());
            let link = encode_link(path.as_os_str().as_bytes());
            write!(html, "<a href=\"{link}\">{name}</a> ")?;
        }
    }
    Ok(())
}

/// Where the output of an attempt is kept; nothing for a stream without any.
#[derive(Debug, Serialize)]
pub(super) struct JobLog {
    pub(super) job: String,
    pub(super) attempt: u32,
    pub(super) stdout: Option<PathBuf>,
    pub(super) stderr: Option<PathBuf>,
}

impl JobLog {
    /// That of an attempt whose logs are in a directory.
    pub(super) fn of_attempt(attempt: &LoggedAttempt, directory: &Path) -> Self {
        let [stdout, stderr] = attempt.log_paths(directory);
        let is_there = |bytes: u64| bytes > 0 && attempt.missing_reason.is_none();
        Self {
            job: attempt.job.clone(),
            attempt: attempt.attempt,
            stdout: Some(stdout).filter(|_| is_there(attempt.stdout_bytes)),
            stderr: Some(stderr).filter(|_| is_there(attempt.stderr_bytes)),
        }
    }
}
