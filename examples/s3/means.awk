# The mean of the day's highest temperatures of each station.
#
#     awk -F, -v year=1821 -f means.awk ghcnd-stations.txt 1821.csv
#
# Columns 42 to 71 of the list of stations are a station's name. A line of a year is
# ID,DATE,ELEMENT,VALUE,…; TMAX is the day's highest temperature in 0.1 °C.
FNR == NR {
    name[substr($0, 1, 11)] = substr($0, 42, 30)
    next
}
$3 == "TMAX" {
    days[$1]++
    sum[$1] += $4 / 10
}
END {
    for (id in days) printf "%s,%s,%d,%.2f,%s\n", year, id, days[id], sum[id] / days[id], name[id]
}
