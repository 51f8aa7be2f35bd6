//! Metrics of the stock sidecars: off by default; where they are served, ports, Service, ServiceMonitor and
//! NetworkPolicy agree.

use std::collections::BTreeMap;

use super::rendered;

const ON: &str = "--set=metrics.sidecars.create=true,metrics.serviceMonitor.create=true,networkPolicy.create=true";

fn text(words: &[&str]) -> Option<String> {
    let output = rendered(words)?;
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    Some(String::from_utf8(output.stdout).expect("text"))
}

/// The objects of a kind.
fn objects<'a>(text: &'a str, kind: &str) -> Vec<&'a str> {
    let kind = format!("\nkind: {kind}\n");
    text.split("\n---\n")
        .filter(|one| one.contains(&kind))
        .collect()
}

/// The port of each container that has `--http-endpoint`, except for the one of snapshot metadata.
fn served(text: &str) -> BTreeMap<String, String> {
    let containers = text.split("\n        - name: ").skip(1);
    let ports = containers.filter_map(|container| {
        let name = container.lines().next()?;
        let (_, rest) = container.split_once("- --http-endpoint=0.0.0.0:")?;
        let port = rest.lines().next()?;
        let opened = format!("- {{name: {name}, containerPort: {port}}}");
        assert!(container.contains(&opened), "no {opened} in\n{container}");
        Some((name.to_string(), port.to_string()))
    });
    ports.collect()
}

#[test]
fn the_metrics_of_sidecars_can_be_scraped_where_they_are_served() {
    let cases: [(&[&str], &str, &[&str]); 3] = [
        (
            &[],
            "Deployment",
            &["provisioner", "resizer", "snapshotter"],
        ),
        (
            &["--set=csiDriver.attach=true"],
            "Deployment",
            &["attacher", "provisioner", "resizer", "snapshotter"],
        ),
        (
            &["--set=singleNode=true,snapshots=false"],
            "DaemonSet",
            &["provisioner", "resizer"],
        ),
    ];
    for (words, pods, expected) in cases {
        let Some(all) = text(&[words, &[ON][..]].concat()) else {
            return;
        };
        let pods = objects(&all, pods)[0];
        let found = served(pods);
        assert_eq!(found.keys().collect::<Vec<_>>(), expected);
        let service = objects(&all, "Service");
        let service = service
            .iter()
            .find(|one| one.contains("component: metrics\n"));
        let monitor = objects(&all, "ServiceMonitor")[0];
        let policies = objects(&all, "NetworkPolicy");
        let component = if words.contains(&"--set=singleNode=true,snapshots=false") {
            "-node\n"
        } else {
            "-controller\n"
        };
        let policy = policies
            .iter()
            .find(|one| one.contains(&format!("\n  name: slackwater{component}")));
        for (name, port) in &found {
            let listed = format!("- {{name: {name}, port: {port}, targetPort: {name}}}");
            assert!(service.expect("a Service").contains(&listed), "{listed}");
            assert!(
                monitor.contains(&format!("    - port: {name}\n")),
                "{monitor}"
            );
            let opened = format!("- {{port: {port}}}");
            assert!(policy.expect("a policy").contains(&opened), "{opened}");
        }
        assert_eq!(monitor.matches("- port: ").count(), found.len() + 1);
        // Other pods have no such ports.
        assert_eq!(all.matches("--http-endpoint=").count(), found.len());
    }
}

#[test]
fn by_default_no_sidecar_serves_metrics() {
    let words = ["--set=metrics.serviceMonitor.create=true,networkPolicy.create=true"];
    let Some(all) = text(&words) else { return };
    assert!(!all.contains("--http-endpoint="));
    assert_eq!(
        objects(&all, "ServiceMonitor")[0]
            .matches("- port: ")
            .count(),
        1
    );
}
