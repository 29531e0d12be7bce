#!/usr/bin/env bash
# A real S3 server for the tests: Ceph's radosgw over one monitor and one OSD in memory, on loopback.
#   radosgw.sh FOLDER      makes FOLDER/ready with the endpoint once it answers; ends with its standard input.
# Access key "outlast-test", secret "not-a-secret-of-anybody". All that it starts ends with it.
set -euo pipefail
folder=$1
mkdir -p "$folder"/{mon,osd,rgw}
pids=()
stop() {
  trap - EXIT TERM INT
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for _ in $(seq 30); do
    local alive=no
    for pid in "${pids[@]}"; do if kill -0 "$pid" 2>/dev/null; then alive=yes; fi; done
    [ $alive = yes ] || break
    sleep 0.1
  done
  for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
}
trap stop EXIT
trap 'exit 1' TERM INT

read -r mon_port rgw_port < <(python3 - <<'PY'
import socket
held = [socket.socket() for _ in range(2)]
for s in held: s.bind(("127.0.0.1", 0))
print(*[s.getsockname()[1] for s in held])
PY
)
fsid=$(cat /proc/sys/kernel/random/uuid)
osd_uuid=$(cat /proc/sys/kernel/random/uuid)
cat >"$folder/ceph.conf" <<CONF
[global]
fsid = $fsid
mon initial members = a
mon host = v2:127.0.0.1:$mon_port
public addr = 127.0.0.1
ms bind msgr1 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = $folder/keyring
run dir = $folder
admin socket =
log file = $folder/\$name.log
mon cluster log file = $folder/cluster.log
pid file =
crash dir = $folder
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
osd crush update on start = true
osd objectstore = memstore
osd data = $folder/osd
osd max object name len = 1024
memstore device bytes = 4294967296
mon data = $folder/mon
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 0
mon data avail warn = 0
mon osd full ratio = 0.99
rgw data = $folder/rgw
rgw frontends = beast endpoint=127.0.0.1:$rgw_port
rgw run sync thread = false
rgw enable usage log = false
rgw dynamic resharding = false
rgw thread pool size = 32
CONF
conf=(--conf "$folder/ceph.conf")
ceph-authtool --create-keyring "$folder/keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
ceph-authtool "$folder/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' >/dev/null
ceph-authtool "$folder/keyring" --gen-key -n osd.0 --cap mon 'allow *' --cap osd 'allow *' >/dev/null
monmaptool --create --clobber --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon_port]" "$folder/monmap" >/dev/null
ceph-mon "${conf[@]}" --mkfs -i a --monmap "$folder/monmap" --keyring "$folder/keyring"
ceph-mon "${conf[@]}" -f -i a &>"$folder/mon.out" </dev/null & pids+=($!)
timeout 30 ceph "${conf[@]}" osd new "$osd_uuid" 0 &>"$folder/osd-new.out" </dev/null
ceph-osd "${conf[@]}" -i 0 --mkfs --osd-uuid "$osd_uuid" &>"$folder/osd-mkfs.out" </dev/null
ceph-osd "${conf[@]}" -f -i 0 &>"$folder/osd.out" </dev/null & pids+=($!)
radosgw "${conf[@]}" -f -n client.admin &>"$folder/rgw.out" </dev/null & pids+=($!)
timeout 60 radosgw-admin "${conf[@]}" user create --uid=outlast --display-name=outlast \
  --access-key=outlast-test --secret-key=not-a-secret-of-anybody &>"$folder/user.out" </dev/null
for _ in $(seq 300); do
  if curl -s -o /dev/null --max-time 2 "http://127.0.0.1:$rgw_port/"; then
    echo "http://127.0.0.1:$rgw_port" >"$folder/ready.tmp"
    mv "$folder/ready.tmp" "$folder/ready"
    break
  fi
  sleep 0.1
done
while read -r _; do :; done  # until whoever started us is gone
