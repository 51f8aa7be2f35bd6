//! A running Prometheus.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::{Scratch, eventually, free_port};

/// What Prometheus scrapes: an address, and labels of its series.
pub type Target<'a> = (&'a str, &'a [(&'a str, &'a str)]);

/// A series of an answer: its labels and its value.
pub type Series = (BTreeMap<String, String>, f64);

/// A running Prometheus with a scrape interval of one second. It is killed when this is dropped.
pub struct Prometheus {
    child: Child,
    address: String,
    log: PathBuf,
}

impl Prometheus {
    /// Starts it with a file of rules, and waits until it has scraped all targets.
    pub fn start(
        program: &Path,
        scratch: &Scratch,
        targets: &[Target<'_>],
        rules: &str,
    ) -> Prometheus {
        let folder = scratch.dir("prometheus");
        let mut settings = String::from(
            "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\nrule_files: [rules.yaml]\nscrape_configs:\n",
        );
        for (number, (address, labels)) in targets.iter().enumerate() {
            let labels = labels
                .iter()
                .map(|(name, value)| format!("{name}: {value}"));
            let labels = labels.collect::<Vec<_>>().join(", ");
            settings += &format!(
                "  - job_name: job-{number}\n    static_configs: [{{targets: ['{address}'], labels: {{{labels}}}}}]\n"
            );
        }
        std::fs::write(folder.join("settings.yaml"), settings).unwrap();
        std::fs::write(folder.join("rules.yaml"), rules).unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let log = folder.join("log");
        let child = Command::new(program)
            .arg("--config.file=settings.yaml")
            .arg("--storage.tsdb.path=data")
            .arg(format!("--web.listen-address={address}"))
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let server = Prometheus {
            child,
            address,
            log,
        };
        eventually("Prometheus has scraped all targets", || {
            server.query("count(up == 1)").is_ok_and(|series| {
                series
                    .first()
                    .is_some_and(|(_, up)| *up == targets.len() as f64)
            })
        });
        server
    }

    /// The answer to a request of its API.
    pub fn get(&self, path: &str) -> Result<Value, String> {
        let failed = |error: std::io::Error| error.to_string();
        let mut stream = TcpStream::connect(&self.address).map_err(failed)?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: {}\r\n\r\n", self.address);
        stream.write_all(request.as_bytes()).map_err(failed)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).map_err(failed)?;
        let (_, body) = answer.split_once("\r\n\r\n").ok_or("no body")?;
        let answer: Value = serde_json::from_str(body).map_err(|error| error.to_string())?;
        match answer["status"].as_str() {
            Some("success") => Ok(answer["data"].clone()),
            _ => Err(answer["error"].to_string()),
        }
    }

    /// The series that a query returns now.
    pub fn query(&self, expression: &str) -> Result<Vec<Series>, String> {
        let encoded: String = expression
            .bytes()
            .map(|byte| match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
                _ => format!("%{byte:02X}"),
            })
            .collect();
        let answer = self.get(&format!("/api/v1/query?query={encoded}"))?;
        let series = answer["result"].as_array().ok_or("no vector")?.iter();
        let series = series.map(|one| {
            let labels = one["metric"].as_object().into_iter().flatten();
            let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
            let labels = labels.map(|(name, value)| (name.clone(), text(value)));
            let value = text(&one["value"][1]).parse::<f64>();
            Ok((labels.collect(), value.map_err(|error| error.to_string())?))
        });
        series.collect()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            eprintln!("--- the log of Prometheus ---\n{log}");
        }
    }
}
