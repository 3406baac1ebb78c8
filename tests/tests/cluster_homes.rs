//! A workflow whose inputs are on a web server and whose results go to a host behind SSH, by real
//! processes of BAFS and of others.

use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::{cannot_mount, processes_with, program, said, skip};

/// A server of others, ended with this value.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn start(command: &mut Command, port: u16) -> Result<Server> {
    let quiet = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let child = quiet
        .spawn()
        .with_context(|| format!("{command:?}; run `cargo xtask test`"))?;
    let server = Server(child);
    for _ in 0..1_000 {
        if TcpStream::connect(("127.0.0.1", port)).is_ok() {
            return Ok(server);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    anyhow::bail!("{command:?} does not listen")
}

/// nginx, and the ports at which it shows `root` plainly and by TLS, with the certificate
/// `own/certificate`.
fn nginx(own: &Path, root: &Path) -> Result<(Server, u16, u16)> {
    let (port, tls) = (free_port()?, free_port()?);
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
           server {{ listen 127.0.0.1:{port}; listen 127.0.0.1:{tls} ssl; root {}; }} }}",
        root.display()
    );
    std::fs::write(&file, text)?;
    let server = start(Command::new("nginx").arg("-c").arg(file), port)?;
    Ok((server, port, tls))
}

/// OpenSSH's server and the settings by which nodes reach it.
fn sshd(own: &Path) -> Result<(Server, u16, String)> {
    let port = free_port()?;
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
    let server = start(command.args(["-D", "-e", "-f", &at("sshd_config")]), port)?;
    let settings = format!(
        "[[home]]\nurl = \"sftp://127.0.0.1:{port}\"\nkey = \"{}\"\nknown_hosts = \"{}\"\n",
        at("key"),
        at("known")
    );
    Ok((server, port, settings))
}

#[test]
fn cluster_runs_a_workflow_between_homes_of_other_kinds() -> Result<()> {
    if let Some(reason) = cannot_mount() {
        skip(
            "cluster_runs_a_workflow_between_homes_of_other_kinds",
            &reason,
        );
        return Ok(());
    }
    let own = tempfile::tempdir()?;
    let (web, out, etc) = (
        own.path().join("web"),
        own.path().join("out"),
        own.path().join("etc"),
    );
    for directory in [&web, &out, &etc] {
        std::fs::create_dir(directory)?;
    }
    let data: String = (0..50_000).map(|line| format!("line {line}\n")).collect();
    std::fs::create_dir(web.join("db"))?;
    std::fs::write(web.join("db/data"), &data)?;
    std::fs::write(web.join("db/bafs.list"), "data\n")?;
    std::fs::write(web.join("query"), "line 4242\n")?;
    let (_nginx, http, https) = nginx(&etc, &web)?;
    let (_sshd, ssh, settings) = sshd(&etc)?;
    let homes = own.path().join("homes.toml");
    std::fs::write(&homes, settings)?;
    std::fs::set_permissions(&homes, std::fs::Permissions::from_mode(0o600))?;
    let workflow = own.path().join("search.bafs");
    let text = format!(
        "volume db cache http://127.0.0.1:{http}/db 1 MB\n\
         for i in 1..2\n\
         volume query$(i) scratch 100 KB files 10 from https://127.0.0.1:{https}/query\n\
         volume work$(i) scratch 1 MB files 10\n\
         job search$(i) {{\n\
           executable = /bin/sh\n\
           arguments = -c \"grep -nxf /in/query /db/data > /work/found; \
           wc -c < /db/data >> /work/found\"\n\
         }}\n\
         mount db search$(i) /db\n\
         mount query$(i) search$(i) /in ro\n\
         mount work$(i) search$(i) /work\n\
         extract work$(i) found sftp://127.0.0.1:{ssh}{}/$(i)\n\
         end\n",
        out.display()
    );
    std::fs::write(&workflow, text)?;
    let mut run = Command::new(program());
    run.args(["run", "--local", "2"])
        .arg(&workflow)
        .env("BAFS_HOMES", &homes)
        .env("SSL_CERT_FILE", etc.join("certificate"));
    let done = run.stdin(Stdio::null()).output()?;
    ensure!(done.status.success(), "{}", said(&done));
    let expected = format!("4243:line 4242\n{}\n", data.len());
    for i in 1..=2 {
        let found = std::fs::read_to_string(out.join(i.to_string()))?;
        ensure!(found == expected, "result {i} is {found:?}");
    }
    ensure!(std::fs::read_dir(&out)?.count() == 2, "uploads are left");
    let ssh = || processes_with(&format!("-i {}", etc.join("key").display()));
    for _ in 0..500 {
        if ssh().is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    ensure!(ssh().is_empty(), "ssh is left: {:?}", ssh());
    Ok(())
}
