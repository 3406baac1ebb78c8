//! HTCondor's file-transfer plug-in: `bafs -classad`, and `bafs -infile A -outfile B [-upload]`.
//!
//! A job brings the program along (`transfer_plugins = bafs=…`), so pools need no installation.
//! The plug-in copies files between the job's directory and home servers. It mounts nothing.

use std::env;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use bafs_server::clock;
use clap::CommandFactory;

use crate::args::Cli;
use crate::class_ad::{AdValue, ClassAd, format_ad, format_lines};
use crate::client::ClusterClient;
use crate::config::Configuration;
use crate::home_files;
use crate::input_file;

/// Bytes of a list of files, and of the ad of a job.
const AD_BYTES_MAX: usize = 64 << 20;

/// Attributes of a job (`My.BafsCatalog = …` in a submit file) that name the cluster.
const CATALOG_ATTRIBUTE: &str = "BafsCatalog";
const IDENTITY_ATTRIBUTE: &str = "BafsIdentity";

/// Name of the identity among the transferred files if the job does not name it.
const IDENTITY_DEFAULT: &str = "bafs-identity";

/// Milliseconds in a second.
const SECOND_MS: u64 = 1_000;

/// The words of HTCondor.
#[derive(Debug, PartialEq, Eq)]
enum PluginRequest {
    Capabilities,
    Transfer {
        requests: PathBuf,
        results: PathBuf,
        is_upload: bool,
    },
}

/// Does what HTCondor asks for, if the words of this process are those of a plug-in.
pub(crate) fn dispatch() -> Option<ExitCode> {
    let words: Vec<OsString> = env::args_os().skip(1).collect();
    match parse_words(&words)? {
        PluginRequest::Capabilities => {
            let printed = crate::output::print_bytes(describe_capabilities().as_bytes());
            Some(exit_code(printed.is_ok()))
        }
        PluginRequest::Transfer {
            requests,
            results,
            is_upload,
        } => Some(match run_transfers(&requests, &results, is_upload) {
            Ok(is_complete) => exit_code(is_complete),
            Err(error) => {
                eprintln!("bafs: {error:#}");
                ExitCode::FAILURE
            }
        }),
    }
}

fn exit_code(is_success: bool) -> ExitCode {
    if is_success {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// The words of a plug-in begin with one dash, which no option of ours does.
fn parse_words(words: &[OsString]) -> Option<PluginRequest> {
    if words.len() == 1 && words[0] == "-classad" {
        return Some(PluginRequest::Capabilities);
    }
    let (mut requests, mut results, mut is_upload) = (None, None, false);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.to_str()? {
            "-infile" => requests = words.next().map(PathBuf::from),
            "-outfile" => results = words.next().map(PathBuf::from),
            "-upload" => is_upload = true,
            _ => return None,
        }
    }
    Some(PluginRequest::Transfer {
        requests: requests?,
        results: results?,
        is_upload,
    })
}

/// Protocol 4 is protocol 2 with a file of results that HTCondor has filled in advance, so that the
/// results fit onto a full disk. An HTCondor of protocol 2 ignores the number.
fn describe_capabilities() -> String {
    let text = |text: &str| AdValue::Text(text.to_owned());
    format_lines(&[
        ("MultipleFileSupport", AdValue::Boolean(true)),
        ("PluginType", text("FileTransfer")),
        ("PluginVersion", text(env!("CARGO_PKG_VERSION"))),
        ("ProtocolVersion", AdValue::Integer(4)),
        ("SupportedMethods", text("bafs")),
    ])
}

/// Writes results over what is in the file, without truncating it: HTCondor has reserved its space.
struct ResultFile {
    file: std::fs::File,
    offset: u64,
}

impl ResultFile {
    fn open(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(path);
        let file = file.with_context(|| format!("open {}", path.display()))?;
        // An earlier result must not count as one of this call; blanks hold the space.
        let bytes = usize::try_from(file.metadata()?.len())?;
        file.write_all_at(&vec![b' '; bytes], 0)?;
        Ok(Self { file, offset: 0 })
    }

    fn append(&mut self, text: &str) -> Result<()> {
        self.file
            .write_all_at(text.as_bytes(), self.offset)
            .context("write a result")?;
        self.offset += text.len() as u64;
        Ok(())
    }
}

/// Transfers all files, and reports each. Answers whether all went well.
fn run_transfers(requests: &Path, results: &Path, is_upload: bool) -> Result<bool> {
    let mut results = ResultFile::open(results)?;
    let runtime = new_runtime()?;
    // A connection belongs to a runtime.
    let _entered = runtime.enter();
    let prepared = read_requests(requests).and_then(|ads| Ok((ads, connect()?)));
    let (ads, client) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            let failed = Transfer::default();
            results.append(&failed.format_result(Err(error), is_upload))?;
            return Ok(false);
        }
    };
    let mut is_complete = true;
    for ad in &ads {
        let mut transfer = Transfer::from_ad(ad);
        let outcome = runtime.block_on(transfer.run(&client, is_upload));
        is_complete &= outcome.is_ok();
        results.append(&transfer.format_result(outcome, is_upload))?;
    }
    Ok(is_complete)
}

fn new_runtime() -> Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    Ok(builder.enable_all().build()?)
}

fn read_requests(path: &Path) -> Result<Vec<ClassAd>> {
    let text = input_file::read_text(path, AD_BYTES_MAX)?;
    let ads = ClassAd::parse_all(&text);
    ads.map_err(|why| anyhow!("{}: {why}", path.display()))
}

/// The cluster that the job names, else the environment, else the configuration file.
fn connect() -> Result<ClusterClient> {
    let job = read_job_ad();
    let files = Configuration::load(&Cli::command()).map_err(|why| anyhow!(why))?;
    let find = |attribute: &str, variable: &str| {
        let of_job = job.text(attribute).map(str::to_owned);
        let set = || env::var(variable).ok().filter(|text| !text.is_empty());
        of_job.or_else(set).or_else(|| files.shared_text(variable))
    };
    let catalog = find(CATALOG_ATTRIBUTE, "BAFS_CATALOG")
        .context("no catalog: add `My.BafsCatalog = \"HOST:PORT\"` to the submit file")?;
    let identity = find(IDENTITY_ATTRIBUTE, "BAFS_IDENTITY");
    let identity = identity.unwrap_or_else(|| IDENTITY_DEFAULT.to_owned());
    let directory = scratch_directory().join(&identity);
    ClusterClient::connect(&directory, &catalog).with_context(|| {
        format!(
            "no identity at {}: add it to transfer_input_files, and name it with My.BafsIdentity",
            directory.display()
        )
    })
}

fn read_job_ad() -> ClassAd {
    let path = env::var_os("_CONDOR_JOB_AD").map(PathBuf::from);
    let path = path.unwrap_or_else(|| scratch_directory().join(".job.ad"));
    let text = input_file::read_text(&path, AD_BYTES_MAX).unwrap_or_default();
    ClassAd::parse_lines(&text)
}

/// The directory of the job, in which HTCondor starts a plug-in.
fn scratch_directory() -> PathBuf {
    let named = env::var_os("_CONDOR_SCRATCH_DIR").map(PathBuf::from);
    named.unwrap_or_else(|| PathBuf::from("."))
}

/// One file to transfer.
#[derive(Debug, Default)]
struct Transfer {
    url: String,
    local: String,
    bytes: u64,
    start_ms: u64,
}

impl Transfer {
    fn from_ad(ad: &ClassAd) -> Self {
        Self {
            url: ad.text("Url").unwrap_or_default().to_owned(),
            local: ad.text("LocalFileName").unwrap_or_default().to_owned(),
            ..Self::default()
        }
    }

    async fn run(&mut self, client: &ClusterClient, is_upload: bool) -> Result<()> {
        self.start_ms = clock::now().0;
        if self.url.is_empty() || self.local.is_empty() {
            return Err(anyhow!("the request lacks Url or LocalFileName"));
        }
        let local = scratch_directory().join(home_files::os_path(&self.local));
        self.bytes = match is_upload {
            true => home_files::upload(client, &local, &self.url).await?,
            false => home_files::download(client, &self.url, &local).await?,
        };
        Ok(())
    }

    /// HTCondor rejects results that lack a URL, a file name or an error, even if they are empty.
    fn format_result(&self, outcome: Result<()>, is_upload: bool) -> String {
        let text = |text: &str| AdValue::Text(text.to_owned());
        let bytes = AdValue::Integer(i64::try_from(self.bytes).unwrap_or(i64::MAX));
        let end_ms = clock::now().0;
        let start_ms = if self.start_ms == 0 {
            end_ms
        } else {
            self.start_ms
        };
        let seconds = |ms: u64| AdValue::Integer(i64::try_from(ms / SECOND_MS).unwrap_or(0));
        let took_s = end_ms.saturating_sub(start_ms) as f64 / SECOND_MS as f64;
        let file_name = Path::new(&self.local).file_name().unwrap_or_default();
        let mut attributes = vec![
            ("TransferSuccess", AdValue::Boolean(outcome.is_ok())),
            ("TransferProtocol", text("bafs")),
            (
                "TransferType",
                text(if is_upload { "upload" } else { "download" }),
            ),
            ("TransferFileName", text(&file_name.to_string_lossy())),
            ("TransferUrl", text(&self.url)),
            ("TransferFileBytes", bytes.clone()),
            ("TransferTotalBytes", bytes),
            ("TransferStartTime", seconds(start_ms)),
            ("TransferEndTime", seconds(end_ms)),
            ("ConnectionTimeSeconds", AdValue::Real(took_s)),
        ];
        if let Err(error) = outcome {
            attributes.push(("TransferError", AdValue::Text(format!("bafs: {error:#}"))));
        }
        format_ad(&attributes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &str) -> Option<PluginRequest> {
        let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
        parse_words(&words)
    }

    #[test]
    fn plugin_words_are_recognised() {
        assert_eq!(parse("-classad"), Some(PluginRequest::Capabilities));
        let expected = |is_upload| {
            Some(PluginRequest::Transfer {
                requests: "in".into(),
                results: "out".into(),
                is_upload,
            })
        };
        assert_eq!(parse("-infile in -outfile out"), expected(false));
        assert_eq!(parse("-outfile out -infile in -upload"), expected(true));
        for other in ["run w", "-infile in", "-V", "-classad x", "volume list"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn result_file_keeps_its_reserved_space() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("results");
        std::fs::write(&path, "[ TransferSuccess = true; ]".repeat(10)).expect("written");
        let mut results = ResultFile::open(&path).expect("opened");
        results.append("[ a = 1; ]\n").expect("written");
        let text = std::fs::read_to_string(&path).expect("read");
        assert_eq!(text.len(), 270, "no space is given back");
        assert_eq!(text.trim_end(), "[ a = 1; ]");
    }

    #[test]
    fn failures_name_url_and_file() {
        let failed = Transfer::default().format_result(Err(anyhow!("no \"home\"")), true);
        let ads = ClassAd::parse_all(&failed).expect("an ad");
        assert_eq!(ads[0].text("TransferError"), Some("bafs: no \"home\""));
        assert_eq!(ads[0].text("TransferUrl"), Some(""));
        assert_eq!(ads[0].text("TransferFileName"), Some(""));
        assert!(failed.contains("TransferSuccess = false"));
    }
}
