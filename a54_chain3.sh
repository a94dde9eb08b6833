. /tmp/w/lead.sh /tmp/w/wt-54; export PYTHONPATH=/tmp/w/wt-54
for s in text_sgd text_secagg text_big; do nice -n 5 timeout 400 python /tmp/w/a54_red2.py $s quick >> /tmp/w/a54_red3.log 2>&1 || echo "TIMEOUT/FAIL $s" >> /tmp/w/a54_red3.log; done
