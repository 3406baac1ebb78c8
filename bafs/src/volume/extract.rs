//! `bafs volume extract`: a file of a volume is sent home. Says what it waits for, and ends when
//! the home stays away; looks for it again meanwhile, as it may be back at another address.

use std::time::Duration;

use anyhow::{Result, bail};
use bafs_proto::ids::ExtractId;
use bafs_proto::message::{Advert, ExtractFile, PutReceipt, ServerKind};
use bafs_proto::time::Deadline;
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::Source;
use bafs_proto::{Error, ErrorCode};
use serde_json::json;

use super::{PATIENCE, TRANSFER_MS};
use crate::args::VolumeExtractArgs;
use crate::client::Client;
use crate::output::Output;

/// A home that is away is looked for again for so long, in milliseconds, after the node found that
/// out, which takes as long.
const AWAY_MS: u64 = 20_000;

/// A node that was at it for so long has heard of the home, in milliseconds.
const LONG_MS: u64 = 3 * AWAY_MS;

/// Pause before it is looked for.
const LOOK: Duration = Duration::from_secs(1);

/// Runs the command.
pub(super) async fn extract(args: VolumeExtractArgs, output: Output) -> Result<()> {
    let client = Client::new(&args.client)?;
    let (node, status) = client.volume(&args.volume).await?;
    let Source::Home {
        address: home,
        path: target,
        id: home_id,
    } = client.home_source(&args.target).await?
    else {
        bail!("'{}' is no place at a home", args.target);
    };
    let resource = Resource::Home(target.clone());
    let mut call = ExtractFile {
        volume: status.spec.id,
        path: args.path,
        // The same one each time: home goes on where it was, and has the file once.
        extract: ExtractId::random(),
        home,
        home_id,
        target,
        home_token: client.give(resource, &[Right::Read, Right::Write])?,
    };
    let mut give_up = None;
    let receipt = loop {
        let long = Deadline::after_ms(LONG_MS);
        let away = match send(&client, &node, &call).await {
            Ok(receipt) => break receipt,
            Err(error) => away(error)?,
        };
        if long.left().is_zero() {
            // It was there meanwhile.
            give_up = None;
        }
        let until = *give_up.get_or_insert_with(|| Deadline::after_ms(AWAY_MS));
        eprintln!("{}; looking for the home again", away.detail);
        call.home = loop {
            if until.left().is_zero() {
                let advice = "start the home again (`bafs servers` shows who lives), then repeat \
                              this command";
                return Err(anyhow::Error::new(away).context(advice));
            }
            tokio::time::sleep(LOOK).await;
            let Some(id) = home_id else {
                break call.home.clone();
            };
            // Another one of that name is not the same home.
            let homes = client.servers(Some(ServerKind::Home)).await;
            let back = homes
                .unwrap_or_default()
                .into_iter()
                .find(|home| home.id == id);
            if let Some(back) = back {
                break back.address;
            }
        };
    };
    output.say(
        &format!(
            "{} bytes are at {} ({})",
            receipt.size, receipt.path, receipt.digest
        ),
        &json!({
            "path": receipt.path,
            "size": receipt.size,
            "blake3": receipt.digest.to_string(),
        }),
    )
}

/// Has the node send the file, and says so when that takes a while.
async fn send(client: &Client, node: &Advert, call: &ExtractFile) -> Result<PutReceipt> {
    let sent = client.call_within(&node.address, call.clone(), TRANSFER_MS);
    tokio::pin!(sent);
    match tokio::time::timeout(PATIENCE, &mut sent).await {
        Ok(sent) => sent,
        Err(_) => {
            eprintln!(
                "node {} sends '{}' to home {}",
                node.name, call.path, call.home
            );
            sent.await
        }
    }
}

/// That the home is away, or any other error as it is.
fn away(error: anyhow::Error) -> Result<Error> {
    let error = error.downcast::<Error>()?;
    match error.code {
        ErrorCode::HomeUnreachable => Ok(error),
        _ => Err(error.into()),
    }
}
