//! `bafs cache`: data of sources that no cache volume shows any more. They wait on the nodes for
//! the next run of the source, in space that nobody reserved.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result};
use bafs_proto::cache::{DropRetainedData, ListRetainedData, RetainedSource};
use bafs_proto::message::{Advert, ServerKind};

use crate::args::CacheCommand;
use crate::client::ClusterClient;
use crate::output::Printer;
use crate::units::format_bytes;

/// Runs a command.
pub(crate) async fn run_cache_command(command: CacheCommand, output: Printer) -> Result<()> {
    match command {
        CacheCommand::List(args) => {
            let client = ClusterClient::new(&args)?;
            let mut found = Vec::new();
            for node in client.list_servers(Some(ServerKind::Node)).await? {
                let listed = client.call(&node.address, ListRetainedData).await;
                let listed = listed.with_context(|| format!("node {}", node.name))?;
                found.push((node, listed.data));
            }
            print_data("no data without a volume", &found, output)
        }
        CacheCommand::Drop(args) => {
            let client = ClusterClient::new(&args.client)?;
            let mut dropped = Vec::new();
            for node in client.list_servers(Some(ServerKind::Node)).await? {
                let path = args.source.clone();
                let listed = client.call(&node.address, DropRetainedData { path }).await;
                let listed = listed.with_context(|| format!("node {}", node.name))?;
                dropped.push((node, listed.data));
            }
            print_data("nothing was removed", &dropped, output)
        }
    }
}

/// A line for each source: its space on all nodes.
fn print_data(
    nothing: &str,
    found: &[(Advert, Vec<RetainedSource>)],
    output: Printer,
) -> Result<()> {
    let mut sources: BTreeMap<(&str, &str), (u64, usize)> = BTreeMap::new();
    let mut rows = Vec::new();
    for (node, data) in found {
        for source in data {
            let sum = sources.entry((&source.address, &source.path)).or_default();
            *sum = (sum.0.saturating_add(source.bytes), sum.1 + 1);
            rows.push(serde_json::json!({
                "node": node.name,
                "home": source.address,
                "source": source.path,
                "bytes": source.bytes,
                "files": source.files,
                "used_at": source.used_at,
            }));
        }
    }
    let mut text = String::new();
    for ((home, path), (bytes, parts)) in &sources {
        let bytes = format_bytes(u128::from(*bytes));
        let on = match parts {
            1 => "1 node".to_owned(),
            parts => format!("{parts} nodes"),
        };
        let _ = writeln!(text, "{path}  {bytes} on {on}  (home {home})");
    }
    let text = match text.is_empty() {
        true => nothing,
        false => text.trim_end(),
    };
    output.print_result(text, &rows)
}
