//! Servers of others for tests on real processes: web, SSH, FTP, object store, each on a free
//! port of loopback. Asserts nothing.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// A server of others, ended with this value.
#[derive(Debug)]
pub struct ExternalServer(Child);

impl Drop for ExternalServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An unused port.
///
/// # Errors
/// The system's error.
pub fn find_free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn start_server(command: &mut Command, port: u16) -> Result<ExternalServer> {
    let quiet = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let child = quiet
        .spawn()
        .with_context(|| format!("{command:?}; run `cargo xtask test`"))?;
    let server = ExternalServer(child);
    for _ in 0..1_000 {
        if TcpStream::connect(("127.0.0.1", port)).is_ok() {
            return Ok(server);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    anyhow::bail!("{command:?} does not listen")
}

/// nginx, and the ports at which it serves `root`: by plain HTTP to all clients, and by TLS, with
/// the certificate `own/certificate`, to clients with the token `sesame`.
///
/// # Errors
/// The failure to start.
pub fn start_nginx(own: &Path, root: &Path) -> Result<(ExternalServer, u16, u16)> {
    let (port, tls) = (find_free_port()?, find_free_port()?);
    let (certificate, key) = (own.join("certificate"), own.join("certificate.key"));
    let mut openssl = Command::new("openssl");
    openssl
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
        ])
        .args([
            "-nodes",
            "-subj",
            "/CN=test",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ])
        .args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout"])
        .arg(key)
        .arg("-out")
        .arg(certificate);
    ensure!(openssl.output()?.status.success(), "{openssl:?}");
    let (file, own) = (own.join("nginx.conf"), own.display());
    let text = format!(
        "daemon off; master_process off; pid {own}/pid; error_log stderr;
         events {{ worker_connections 64; }}
         http {{ access_log {own}/access; client_body_temp_path {own}/1; proxy_temp_path {own}/2;
           fastcgi_temp_path {own}/3; uwsgi_temp_path {own}/4; scgi_temp_path {own}/5;
           ssl_certificate {own}/certificate; ssl_certificate_key {own}/certificate.key;
           server {{ listen 127.0.0.1:{port}; root {root}; }}
           server {{ listen 127.0.0.1:{tls} ssl; root {root};
             if ($http_authorization != \"Bearer sesame\") {{ return 401; }} }} }}",
        root = root.display()
    );
    std::fs::write(&file, text)?;
    let server = start_server(Command::new("nginx").arg("-c").arg(file), port)?;
    Ok((server, port, tls))
}

/// OpenSSH's server and the settings by which nodes reach it.
///
/// # Errors
/// The failure to start.
pub fn start_sshd(own: &Path) -> Result<(ExternalServer, u16, String)> {
    let port = find_free_port()?;
    let at = |name: &str| own.join(name).display().to_string();
    for name in ["host", "key"] {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f", &at(name)]);
        ensure!(keygen.status()?.success(), "{keygen:?}");
    }
    let host = std::fs::read_to_string(at("host.pub"))?;
    std::fs::write(at("known"), format!("[127.0.0.1]:{port} {host}"))?;
    let text = format!(
        "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\n\
         StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n\
         PasswordAuthentication no\nSubsystem sftp internal-sftp\n",
        at("host"),
        at("key.pub")
    );
    std::fs::write(at("sshd_config"), text)?;
    let _ = std::fs::create_dir_all("/run/sshd");
    let mut command = Command::new("/usr/sbin/sshd");
    let server = start_server(command.args(["-D", "-e", "-f", &at("sshd_config")]), port)?;
    let settings = format!(
        "[[home]]\nurl = \"sftp://127.0.0.1:{port}\"\nkey = \"{}\"\nknown_hosts = \"{}\"\n",
        at("key"),
        at("known")
    );
    Ok((server, port, settings))
}

/// pyftpdlib, which shows `root`, and the settings by which nodes reach it.
///
/// # Errors
/// The failure to start.
pub fn start_ftp_server(root: &Path) -> Result<(ExternalServer, u16, String)> {
    let port = find_free_port()?;
    let mut command = Command::new("/usr/bin/python3");
    let address = ["-i", "127.0.0.1", "-p", &port.to_string()];
    command.args(["-m", "pyftpdlib", "-w", "-u", "me", "-P", "hush"]);
    command.args(address).arg("-d").arg(root);
    let settings =
        format!("[[home]]\nurl = \"ftp://127.0.0.1:{port}\"\nuser = \"me\"\npassword = \"hush\"\n");
    Ok((start_server(&mut command, port)?, port, settings))
}

/// s3s-fs with the bucket `bucket` in `root`, for everybody, and the settings by which nodes reach
/// it; `None` when it was not built here.
///
/// # Errors
/// The failure to start.
pub fn start_object_store(root: &Path) -> Result<Option<(ExternalServer, String)>> {
    let Some(program) = crate::find_tool("s3s-fs") else {
        return Ok(None);
    };
    std::fs::create_dir_all(root.join("bucket"))?;
    let port = find_free_port()?;
    let mut command = Command::new(program);
    command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
    let settings = format!(
        "[[home]]\nurl = \"s3://bucket\"\nendpoint = \"http://127.0.0.1:{port}\"\n\
         region = \"us-east-1\"\n"
    );
    Ok(Some((start_server(command.arg(root), port)?, settings)))
}
