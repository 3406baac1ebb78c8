//! A report as one page that needs nothing else: no script, no style sheet, no picture of others.

use std::fmt::Write;

use anyhow::Result;
use bafs_proto::path::steers_text;
use bafs_sched::goodput::Account;
use bafs_sched::logic::Outcome;

use super::{Report, charts};

/// Rows of a table at most: more is in the data (`--json`).
const ROWS_MAX: usize = 1_000;

const STYLE: &str = "body{font:14px sans-serif;max-width:1000px;margin:2em auto;color:#222}\
h1{font-size:22px}h2{font-size:17px;margin-top:2em}table{border-collapse:collapse}\
td,th{padding:2px 10px 2px 0;text-align:left;border-bottom:1px solid #ddd;vertical-align:top}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}\
.warn{color:#a00}.small{color:#666;font-size:12px}";

/// The page.
pub(super) fn page(report: &Report) -> Result<String> {
    let timeline = &report.timeline;
    let mut html =
        String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    html += "<meta http-equiv=\"Content-Security-Policy\" \
             content=\"default-src 'none'; style-src 'unsafe-inline'\">";
    let title = escape(&timeline.workflow);
    write!(
        html,
        "<title>{title}</title><style>{STYLE}</style></head><body>"
    )?;
    write!(
        html,
        "<h1>{title}: {}</h1>",
        ended(timeline.outcome.as_ref())
    )?;
    summary(&mut html, report)?;
    warnings(&mut html, report)?;
    for picture in [
        charts::gantt(timeline)?,
        charts::processors(timeline)?,
        charts::space(timeline)?,
        charts::home(timeline)?,
    ] {
        write!(html, "<p>{picture}</p>")?;
    }
    html += "<p class=\"small\">A journal knows when files came home and which pages jobs read \
             from caches; the bytes that caches fetched are counted by the home server.</p>";
    ledger(&mut html, report)?;
    failures(&mut html, report)?;
    copies(&mut html, report)?;
    happened(&mut html, report)?;
    html += "</body></html>\n";
    Ok(html)
}

fn ended(outcome: Option<&Outcome>) -> &'static str {
    match outcome {
        Some(Outcome::Complete) => "complete",
        Some(Outcome::Failed { .. }) => "FAILED",
        Some(Outcome::Cancelled) => "cancelled",
        None => "under way",
    }
}

fn summary(html: &mut String, report: &Report) -> Result<()> {
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
        seconds(timeline.wall_ms),
        escape(&timeline.run.to_string()),
    )?;
    Ok(())
}

fn warnings(html: &mut String, report: &Report) -> Result<()> {
    if report.warnings.is_empty() {
        return Ok(());
    }
    *html += "<h2>Warnings</h2><ul>";
    for warning in report.warnings.iter().take(ROWS_MAX) {
        write!(html, "<li class=\"warn\">{}</li>", escape(warning))?;
    }
    *html += "</ul>";
    Ok(())
}

fn ledger(html: &mut String, report: &Report) -> Result<()> {
    let goodput = &report.goodput;
    *html += "<h2>Ledger: where the time went</h2>";
    write!(
        html,
        "<p>{} % of the time of all slots was computing that was kept. All times in seconds; the \
         columns sum to the time from the run's begin to the job's results at home.</p>",
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
    account(html, "all jobs", &goodput.total)?;
    for job in goodput.jobs.iter().take(ROWS_MAX) {
        account(html, &job.job, &job.account)?;
    }
    *html += "</table>";
    left_out(html, goodput.jobs.len())
}

fn account(html: &mut String, name: &str, account: &Account) -> Result<()> {
    write!(html, "<tr><td>{}</td>", escape(name))?;
    for ms in [
        account.computing_ms,
        account.waiting_ms,
        account.copying_ms,
        account.lost_ms,
        account.overhead_ms,
        account.queued_ms,
        account.sum_ms(),
    ] {
        write!(html, "<td class=\"n\">{}</td>", seconds(ms))?;
    }
    *html += "</tr>";
    Ok(())
}

fn failures(html: &mut String, report: &Report) -> Result<()> {
    let timeline = &report.timeline;
    let lost: Vec<_> = timeline
        .executions
        .iter()
        .filter(|execution| execution.fate.is_lost())
        .collect();
    if lost.is_empty() {
        return Ok(());
    }
    *html += "<h2>Failures</h2>";
    head(html, &["job", "node", "from, s", "to, s", "how it ended"])?;
    for execution in lost.iter().take(ROWS_MAX) {
        let until = execution.ended_ms.unwrap_or(timeline.wall_ms);
        let how = match execution.fate {
            bafs_sched::timeline::Fate::RolledBack => "done, but what it wrote was lost",
            _ => &execution.ended_how,
        };
        row(
            html,
            &[
                &timeline.jobs[execution.job.as_usize()].name,
                &execution.node,
                &seconds(execution.asked_ms),
                &seconds(until),
                how,
            ],
        )?;
    }
    *html += "</table>";
    left_out(html, lost.len())
}

fn copies(html: &mut String, report: &Report) -> Result<()> {
    let receipts = &report.timeline.receipts;
    if receipts.is_empty() {
        return Ok(());
    }
    *html += "<h2>Copies to other nodes, with receipts</h2>";
    let titles = [
        "volume",
        "at, s",
        "a loss costs, s",
        "probability, %",
        "benefit, s",
        "takes, s",
        "jobs wait, s",
        "space keeps waiting, s",
        "decision",
    ];
    head(html, &titles)?;
    for receipt in receipts.iter().take(ROWS_MAX) {
        // How long jobs wait for a copy is known as soon as it is known how long that takes.
        let known = |ms: u64| match receipt.copy_ms {
            Some(_) => seconds(ms),
            None => "not known yet".to_owned(),
        };
        row(
            html,
            &[
                &receipt.volume,
                &seconds(receipt.at_ms),
                &seconds(receipt.redo_ms),
                &format!("{:.4}", receipt.risk_ppm as f64 / 1e4),
                &format!("{:.3}", receipt.benefit_us as f64 / 1e6),
                &known(receipt.copy_ms.unwrap_or(0)),
                &known(receipt.wait_ms),
                &seconds(receipt.space_ms),
                &receipt.decision,
            ],
        )?;
    }
    *html += "</table>";
    left_out(html, receipts.len())
}

fn happened(html: &mut String, report: &Report) -> Result<()> {
    *html += "<h2>What happened</h2>";
    head(html, &["s", ""])?;
    for line in report.lines.iter().take(ROWS_MAX) {
        row(html, &[&seconds(line.at_ms), &line.text])?;
    }
    *html += "</table>";
    left_out(html, report.lines.len())
}

fn head(html: &mut String, titles: &[&str]) -> Result<()> {
    *html += "<table><tr>";
    for title in titles {
        write!(html, "<th>{title}</th>")?;
    }
    *html += "</tr>";
    Ok(())
}

fn row(html: &mut String, cells: &[&str]) -> Result<()> {
    *html += "<tr>";
    for cell in cells {
        write!(html, "<td>{}</td>", escape(cell))?;
    }
    *html += "</tr>\n";
    Ok(())
}

fn left_out(html: &mut String, rows: usize) -> Result<()> {
    if rows > ROWS_MAX {
        let more = rows - ROWS_MAX;
        write!(
            html,
            "<p class=\"small\">{more} more: bafs report --json</p>"
        )?;
    }
    Ok(())
}

fn seconds(ms: u64) -> String {
    format!("{}.{:03}", ms / 1_000, ms % 1_000)
}

/// Text as a page shows it, whatever is in it.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            c if steers_text(c) && c != '\n' && c != '\t' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}
