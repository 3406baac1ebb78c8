//! A report as one page that needs nothing else: no script, no style sheet, no picture of others.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use bafs_sched::Outcome;
use bafs_sched::goodput::TimeAccount;

use super::{ReportData, charts, jobs};
use crate::html_text::escape_html;

/// Rows of a table at most: more is in the data (`--json`).
pub(super) const ROWS_MAX: usize = 1_000;

const STYLE_SHEET: &str = "body{font:14px sans-serif;max-width:1000px;margin:2em auto;color:#222}\
h1{font-size:22px}h2{font-size:17px;margin-top:2em}table{border-collapse:collapse}\
td,th{padding:2px 10px 2px 0;text-align:left;border-bottom:1px solid #ddd;vertical-align:top}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}\
pre{margin:2px 0;white-space:pre-wrap;\
color:#444;font-size:12px}.warn{color:#a00}.small{color:#666;font-size:12px}";

/// The page, which will be in a directory: links to files beside it lead there. Without one they
/// have whole paths.
pub(super) fn render_page(report: &ReportData, directory: Option<&Path>) -> Result<String> {
    let timeline = &report.timeline;
    let mut html =
        String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    html += "<meta http-equiv=\"Content-Security-Policy\" \
             content=\"default-src 'none'; style-src 'unsafe-inline'\">";
    let title = escape_html(&timeline.workflow);
    write!(
        html,
        "<title>{title}</title><style>{STYLE_SHEET}</style></head><body>"
    )?;
    write!(
        html,
        "<h1>{title}: {}</h1>",
        outcome_text(timeline.outcome.as_ref())
    )?;
    write_summary(&mut html, report)?;
    write_warnings(&mut html, report)?;
    for picture in [
        charts::draw_gantt(timeline),
        charts::draw_processors(timeline)?,
        charts::draw_space(timeline)?,
        charts::draw_home_traffic(timeline)?,
    ] {
        write!(html, "<p>{picture}</p>")?;
    }
    html += "<p class=\"small\">A journal records the arrival of files at home and the pages that \
             jobs read from caches. The home server counts the bytes that caches fetch.</p>";
    jobs::write_jobs(&mut html, report, directory)?;
    write_failures(&mut html, report, directory)?;
    write_ledger(&mut html, report)?;
    write_copies(&mut html, report)?;
    write_measured_sizes(&mut html, report)?;
    write_events(&mut html, report)?;
    html += "</body></html>\n";
    Ok(html)
}

fn outcome_text(outcome: Option<&Outcome>) -> &'static str {
    match outcome {
        Some(Outcome::Complete) => "complete",
        Some(Outcome::Failed { .. }) => "FAILED",
        Some(Outcome::Cancelled) => "cancelled",
        None => "running",
    }
}

fn write_summary(html: &mut String, report: &ReportData) -> Result<()> {
    let (timeline, progress) = (&report.timeline, &report.timeline.progress);
    write!(
        html,
        "<p>{} of {} jobs done by {} executions, {} of {} files at home ({} bytes), {} nodes, \
         {} s. Run {}.</p>",
        progress.jobs_done,
        progress.jobs_total,
        timeline.executions.len(),
        progress.extracts_done,
        progress.extracts_total,
        progress.extracted_bytes,
        timeline.nodes.len(),
        format_seconds(timeline.wall_ms),
        escape_html(&timeline.run.to_string()),
    )?;
    Ok(())
}

fn write_warnings(html: &mut String, report: &ReportData) -> Result<()> {
    if report.warnings.is_empty() {
        return Ok(());
    }
    *html += "<h2>Warnings</h2><ul>";
    for warning in report.warnings.iter().take(ROWS_MAX) {
        // The last lines that a job printed follow the first one.
        let (first, rest) = warning.split_once('\n').unwrap_or((warning, ""));
        write!(html, "<li class=\"warn\">{}", escape_html(first))?;
        if !rest.is_empty() {
            write!(html, "<pre>{}</pre>", escape_html(rest))?;
        }
        *html += "</li>";
    }
    *html += "</ul>";
    Ok(())
}

fn write_ledger(html: &mut String, report: &ReportData) -> Result<()> {
    let goodput = &report.goodput;
    *html += "<h2>Ledger: where the time went</h2>";
    write!(
        html,
        "<p>{} % of the time of all slots was useful computing. Times are in seconds; the columns \
         sum to the time from the start of the run to the arrival of the job's results at \
         home.</p>",
        goodput.goodput_permille as f64 / 10.0
    )?;
    *html += "<table><tr><th>job</th>";
    let columns = [
        "computing",
        "waiting for data",
        "copying",
        "lost work",
        "overhead",
        "queued",
        "sum",
    ];
    for column in columns {
        write!(html, "<th class=\"n\">{column}</th>")?;
    }
    *html += "</tr>";
    write_account(html, "all jobs", &goodput.total)?;
    for job in goodput.jobs.iter().take(ROWS_MAX) {
        write_account(html, &job.job, &job.account)?;
    }
    *html += "</table>";
    write_omitted(html, goodput.jobs.len())
}

fn write_account(html: &mut String, name: &str, account: &TimeAccount) -> Result<()> {
    write!(html, "<tr><td>{}</td>", escape_html(name))?;
    for ms in [
        account.computing_ms,
        account.io_wait_ms,
        account.copying_ms,
        account.lost_ms,
        account.overhead_ms,
        account.queued_ms,
        account.sum_ms(),
    ] {
        write!(html, "<td class=\"n\">{}</td>", format_seconds(ms))?;
    }
    *html += "</tr>";
    Ok(())
}

fn write_failures(html: &mut String, report: &ReportData, directory: Option<&Path>) -> Result<()> {
    let timeline = &report.timeline;
    let lost: Vec<_> = timeline
        .executions
        .iter()
        .filter(|execution| execution.outcome.is_wasted())
        .collect();
    if lost.is_empty() {
        return Ok(());
    }
    *html += "<h2>Failures</h2>";
    let titles = [
        "job",
        "node",
        "from, s",
        "to, s",
        "outcome, and last lines",
        "logs",
    ];
    write_header(html, &titles)?;
    for execution in lost.iter().take(ROWS_MAX) {
        let until = execution.ended_ms.unwrap_or(timeline.wall_ms);
        let how = match execution.outcome {
            bafs_sched::timeline::ExecutionOutcome::RolledBack => "done, but its output was lost",
            _ => &execution.end_description,
        };
        let job = &timeline.jobs[execution.job.as_usize()].name;
        *html += "<tr>";
        for cell in [
            job,
            &execution.node,
            &format_seconds(execution.requested_ms),
            &format_seconds(until),
        ] {
            write!(html, "<td>{}</td>", escape_html(cell))?;
        }
        write!(html, "<td>{}", escape_html(how))?;
        if !execution.output_tail.is_empty() {
            write!(html, "<pre>{}</pre>", escape_html(&execution.output_tail))?;
        }
        *html += "</td><td>";
        let attempt = report.attempt_of(execution);
        jobs::write_links(
            html,
            report.logs_of(job).filter(|it| it.attempt == attempt),
            directory,
        )?;
        *html += "</td></tr>\n";
    }
    *html += "</table>";
    write_omitted(html, lost.len())
}

fn write_copies(html: &mut String, report: &ReportData) -> Result<()> {
    let decisions = &report.timeline.copy_decisions;
    if decisions.is_empty() {
        return Ok(());
    }
    *html += "<h2>Copies to other nodes</h2>";
    let titles = [
        "volume",
        "at, s",
        "cost of a loss, s",
        "probability, %",
        "benefit, s",
        "copy time, s",
        "wait of jobs, s",
        "delay by space, s",
        "decision",
    ];
    write_header(html, &titles)?;
    for decision in decisions.iter().take(ROWS_MAX) {
        // How long jobs wait for a copy is known as soon as it is known how long that takes.
        let known = |ms: u64| match decision.copy_ms {
            Some(_) => format_seconds(ms),
            None => "unknown".to_owned(),
        };
        write_row(
            html,
            &[
                &decision.volume,
                &format_seconds(decision.at_ms),
                &format_seconds(decision.redo_ms),
                &format!("{:.4}", decision.risk_ppm as f64 / 1e4),
                &format!("{:.3}", decision.benefit_us as f64 / 1e6),
                &known(decision.copy_ms.unwrap_or(0)),
                &known(decision.wait_ms),
                &format_seconds(decision.space_ms),
                &decision.decision,
            ],
        )?;
    }
    *html += "</table>";
    write_omitted(html, decisions.len())
}

/// Volumes whose size the workflow does not know, and what they held.
fn write_measured_sizes(html: &mut String, report: &ReportData) -> Result<()> {
    let volumes = report.volume_sizes.iter();
    let unknown = volumes.filter(|volume| volume.declared_bytes.is_none());
    let measured = unknown.filter_map(|volume| Some((volume, volume.held_bytes?)));
    let rows: Vec<_> = measured.collect();
    if rows.is_empty() {
        return Ok(());
    }
    *html += "<h2>Measured sizes</h2>";
    write_header(
        html,
        &["volume of unknown size", "held up to, bytes", "files"],
    )?;
    for (volume, bytes) in rows.iter().take(ROWS_MAX) {
        let files = volume.held_files.unwrap_or(0).to_string();
        write_row(html, &[&volume.name, &bytes.to_string(), &files])?;
    }
    *html += "</table>";
    write_omitted(html, rows.len())
}

fn write_events(html: &mut String, report: &ReportData) -> Result<()> {
    *html += "<h2>Events</h2>";
    write_header(html, &["s", ""])?;
    for line in report.history_lines.iter().take(ROWS_MAX) {
        write_row(html, &[&format_seconds(line.at_ms), &line.text])?;
    }
    *html += "</table>";
    write_omitted(html, report.history_lines.len())
}

pub(super) fn write_header(html: &mut String, titles: &[&str]) -> Result<()> {
    *html += "<table><tr>";
    for title in titles {
        write!(html, "<th>{title}</th>")?;
    }
    *html += "</tr>";
    Ok(())
}

fn write_row(html: &mut String, cells: &[&str]) -> Result<()> {
    *html += "<tr>";
    for cell in cells {
        write!(html, "<td>{}</td>", escape_html(cell))?;
    }
    *html += "</tr>\n";
    Ok(())
}

pub(super) fn write_omitted(html: &mut String, rows: usize) -> Result<()> {
    if rows > ROWS_MAX {
        let more = rows - ROWS_MAX;
        write!(
            html,
            "<p class=\"small\">{more} more: bafs report --json</p>"
        )?;
    }
    Ok(())
}

pub(super) fn format_seconds(ms: u64) -> String {
    format!("{}.{:03}", ms / 1_000, ms % 1_000)
}
