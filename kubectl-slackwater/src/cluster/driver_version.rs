//! Notes if the driver in the cluster is of another release than this program.

use crate::cluster::Cluster;
use crate::cluster::object;

/// The release of this program.
const OWN: &str = env!("CARGO_PKG_VERSION");
/// The label with which the chart marks its objects as those of the driver.
const NAME_LABEL: &str = "app.kubernetes.io/name";
/// The label with the release of the driver.
const VERSION_LABEL: &str = "app.kubernetes.io/version";

/// Notes a difference. There is no note if the user may not read the CSIDriver, or if it does not have
/// the labels of the chart.
pub async fn compare(cluster: &Cluster) {
    let driver = cluster.find_one(&object::CSI_DRIVER, "", &cluster.driver);
    let Ok(Some(driver)) = driver.await else {
        return;
    };
    let label = |name: &str| {
        let labels = driver.metadata.labels.as_ref();
        labels.and_then(|labels| labels.get(name)).cloned()
    };
    if label(NAME_LABEL).as_deref() != Some("slackwater") {
        return;
    }
    if let Some(note) = label(VERSION_LABEL).and_then(|version| difference(&version)) {
        cluster.note(note);
    }
}

fn difference(version: &str) -> Option<String> {
    (version != OWN).then(|| {
        format!(
            "the driver in the cluster is of release {version} and this plugin of release {OWN}: one of them may not know all fields of the other; use the plugin of the release of the driver"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_another_release_is_noted() {
        assert_eq!(difference(OWN), None);
        let note = difference("99.0.0").unwrap();
        assert!(note.contains("99.0.0") && note.contains(OWN), "{note}");
    }
}
