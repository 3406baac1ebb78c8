//! `bafs volume extract`: a file of a volume is sent home. Says what it waits for, and ends
//! when the home stays away; looks for it again meanwhile, as it may be back at another address.

use std::time::Duration;

use anyhow::Result;
use bafs_proto::file_set::FileSelection;
use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{
    Advert, ExtractFile, IssueUploadEpoch, PutReceipt, ServerKind, UploadFence,
};
use bafs_proto::time::Deadline;
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::VolumeSource;
use bafs_proto::{Error, ErrorCode};
use serde_json::json;

use super::connection::{PROGRESS_NOTICE_DELAY, TRANSFER_TIMEOUT_MS, connect};
use crate::args::{UsageError, VolumeExtractArgs};
use crate::client::ClusterClient;
use crate::output::Printer;

/// A home that is away is looked for again for so long, in milliseconds, after the node found that
/// out, which takes as long.
const HOME_TIMEOUT_MS: u64 = 20_000;

/// A node that was at it for so long has heard of the home, in milliseconds.
const HOME_CONTACT_MS: u64 = 3 * HOME_TIMEOUT_MS;

/// Pause before it is looked for.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the command.
pub(super) async fn extract_file(args: VolumeExtractArgs, output: Printer) -> Result<()> {
    let selections = read_selections(&args)?;
    let client = connect(&args.client)?;
    let (node, status) = client.find_volume(&args.volume).await?;
    let VolumeSource::Home {
        address: home,
        path: target,
        id: home_id,
    } = client.resolve_source(&args.target).await?
    else {
        return Err(UsageError::from_reason(format!(
            "'{}' is not a URL of a home; write bafs://HOST/PATH",
            args.target
        )));
    };
    let is_set = !selections.is_empty();
    let resource = Resource::Home(target.clone());
    let mut call = ExtractFile {
        volume: status.spec.id,
        path: args.paths.join(" "),
        selections,
        // The same one each time: home goes on where it was, and has the file once.
        extraction: ExtractionId::random(),
        home_address: home,
        home_id,
        target_path: target,
        home_token: client.issue_token(resource, &[Right::Read, Right::Write])?,
        fence: None,
    };
    let mut give_up = None;
    let receipt = loop {
        let long = Deadline::after_ms(HOME_CONTACT_MS);
        let away = match send_file(&client, &node, &mut call).await {
            Ok(receipt) => break receipt,
            Err(error) => expect_home_unreachable(error)?,
        };
        if long.remaining().is_zero() {
            // It was there meanwhile.
            give_up = None;
        }
        let until = *give_up.get_or_insert_with(|| Deadline::after_ms(HOME_TIMEOUT_MS));
        eprintln!("{}; searching for the home again", away.detail);
        call.home_address = loop {
            if until.remaining().is_zero() {
                let advice = "start the home again (`bafs servers` lists live homes), then repeat \
                              this command";
                return Err(anyhow::Error::new(away).context(advice));
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
            let Some(id) = home_id else {
                break call.home_address.clone();
            };
            // Another one of that name is not the same home.
            let homes = client.list_servers(Some(ServerKind::Home)).await;
            let back = homes
                .unwrap_or_default()
                .into_iter()
                .find(|home| home.id == id);
            if let Some(back) = back {
                break back.address;
            }
        };
    };
    print_receipt(&receipt, is_set, output)
}

fn print_receipt(receipt: &PutReceipt, is_set: bool, output: Printer) -> Result<()> {
    let place = match is_set {
        true => format!("at home; their manifest is {}", receipt.path),
        false => format!("at {}", receipt.path),
    };
    output.print_result(
        &format!("{} bytes are {place} ({})", receipt.size, receipt.digest),
        &json!({
            "path": receipt.path,
            "size": receipt.size,
            "blake3": receipt.digest.to_string(),
        }),
    )
}

/// The parts of a set; none for one file.
fn read_selections(args: &VolumeExtractArgs) -> Result<Vec<FileSelection>> {
    let selections: Vec<_> = args
        .paths
        .iter()
        .map(|it| FileSelection::of_word(it))
        .collect();
    if args.target.ends_with('/') {
        return Ok(selections);
    }
    // A single file may have any name.
    if selections.len() > 1 || matches!(selections[0], FileSelection::Directory(_)) {
        return Err(UsageError::from_reason(format!(
            "'{}' is a set of files; write the target as '{}/'",
            args.paths.join(" "),
            args.target
        )));
    }
    Ok(Vec::new())
}

/// Has the node send the file, and says so when that takes a while.
async fn send_file(
    client: &ClusterClient,
    node: &Advert,
    call: &mut ExtractFile,
) -> Result<PutReceipt> {
    let text = format!(
        "node {} sends '{}' to home {}",
        node.name, call.path, call.home_address
    );
    let sent = send_fenced(client, node, call);
    tokio::pin!(sent);
    match tokio::time::timeout(PROGRESS_NOTICE_DELAY, &mut sent).await {
        Ok(sent) => sent,
        Err(_) => {
            eprintln!("{text}");
            sent.await
        }
    }
}

/// Sends the file, as an upload after all that were decided before, if the home knows an order.
async fn send_fenced(
    client: &ClusterClient,
    node: &Advert,
    call: &mut ExtractFile,
) -> Result<PutReceipt> {
    if call.fence.is_none() {
        let ask = IssueUploadEpoch {
            home_address: Some(call.home_address.clone()),
            home_id: call.home_id,
            path: call.target_path.clone(),
        };
        let issued = client.call_with_timeout(&node.address, ask, HOME_CONTACT_MS);
        call.fence = match issued.await.map_err(anyhow::Error::downcast::<Error>) {
            Ok(reply) => Some(UploadFence {
                epoch: reply.epoch,
                order: 0,
            }),
            Err(Ok(error)) if error.code == ErrorCode::Unsupported => None,
            Err(Ok(error)) => return Err(error.into()),
            Err(Err(error)) => return Err(error),
        };
    }
    client
        .call_with_timeout(&node.address, call.clone(), TRANSFER_TIMEOUT_MS)
        .await
}

/// That the home is away, or any other error as it is.
fn expect_home_unreachable(error: anyhow::Error) -> Result<Error> {
    let error = error.downcast::<Error>()?;
    match error.code {
        ErrorCode::HomeUnreachable => Ok(error),
        _ => Err(error.into()),
    }
}
